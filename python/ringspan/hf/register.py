"""Registration of the attention and of its mask function. The only import of transformers that users see."""

from __future__ import annotations

from ringspan.hf.models import NAME

_NEEDED = "transformers is not installed; ringspan.hf needs it: pip install 'ringspan[hf]'"


def register() -> None:
    """Makes `attn_implementation="ringspan"` known to transformers. May be called again.

    Raises ImportError where transformers is not installed, and NotImplementedError where its mask functions are others
    than those known here (docs/transformers.md names the version).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(_NEEDED) from None

    from ringspan.hf.attention import attend
    from ringspan.hf.masks import make_mask
    from ringspan.hf.patterns import known_factories

    known_factories()
    AttentionInterface.register(NAME, attend)
    # Without this one transformers makes no mask at all: padding and packed documents would be dropped in silence.
    AttentionMaskInterface.register(NAME, make_mask)
