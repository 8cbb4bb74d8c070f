"""ringspan as an attention implementation of transformers, on one rank and under context parallelism.

    import ringspan.hf

    ringspan.hf.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ringspan")
    logits = model(input_ids).logits  # one rank: as before

    with ringspan.hf.context_parallel(model, group=group, shard_map=smap):
        logits = model(input_ids=local_ids, position_ids=local_positions).logits  # this rank's tokens

    model          pre-hook: checks arguments, gathers positions and padding          (context.py)
      masks        closures of transformers' mask functions -> a `StructuredMask`     (patterns.py, masks.py)
      each layer   attention(..., attention_mask=StructuredMask) -> rs.attention      (attention.py)

A `StructuredMask` carries all that a layer's attention needs, the group too. So a layer that is computed again in
backward, outside the context, computes the same. docs/transformers.md says what is honoured and what is refused.
"""

from ringspan.hf.context import context_parallel
from ringspan.hf.models import CHECKED_MODELS, NAME

__all__ = ["CHECKED_MODELS", "NAME", "context_parallel", "register"]

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
