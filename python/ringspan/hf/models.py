"""Which models context parallelism is offered for: attention apart, each token must be computed by itself."""

from __future__ import annotations

from typing import Any

from torch import nn

NAME = "ringspan"  # as `attn_implementation`
# Compared with one process, on two ranks, by tests/multiproc/test_hf_cp.py: each and every one.
CHECKED_MODELS = frozenset(
    {
        "bert",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "modernbert",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "roberta",
        "smollm3",
    }
)
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Frequencies that depend on the largest position that a rank sees.
_ROPES_OF_LENGTH = {"dynamic", "longrope"}
# They look at the first or the last token, which one rank holds.
_ONE_TOKEN_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")


def find_model(module: nn.Module) -> nn.Module:
    """The one transformers model in `module`, which may be wrapped (DDP, PEFT, a compiled module).

    ValueError where there is none or more than one.
    """
    from transformers import PreTrainedModel

    if not isinstance(module, nn.Module):
        raise ValueError(f"model is of {type(module).__name__}; give a transformers model, or a module around one")
    found = _outermost(module, PreTrainedModel)
    if len(found) != 1:
        raise ValueError(f"{type(module).__name__} holds {len(found)} transformers models; give one")
    return found[0]


def check_model(model: Any, assume_token_wise: bool) -> None:
    """ValueError where attention is not ringspan's; NotImplementedError for a model that is not offered."""
    config = model.config
    if config._attn_implementation != NAME:
        raise ValueError(
            f"the model has attn_implementation={config._attn_implementation!r}, which sees this rank's tokens only; "
            f'call ringspan.hf.register() and give attn_implementation="{NAME}"'
        )
    refused = _reason(model, config)
    if refused is None and config.model_type not in CHECKED_MODELS and not assume_token_wise:
        refused = (
            f"model_type={config.model_type!r} has not been checked under context parallelism. If attention apart it "
            "treats each token by itself, and takes positions from position_ids alone, give assume_token_wise=True"
        )
    if refused is not None:
        raise NotImplementedError(refused)


def _reason(model: Any, config: Any) -> str | None:
    """Why a model is refused whatever the caller vouches for."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "cross attention is not offered under context parallelism; run this model on one rank"
    if config.get_text_config() is not config:
        return f"{type(model).__name__} is made of several models; context parallelism is offered for text models alone"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        return f"layer_types {', '.join(others)} mix tokens in another way than attention; see docs/transformers.md"
    ropes = sorted(_rope_types(getattr(config, "rope_parameters", None)) & _ROPES_OF_LENGTH)
    if ropes:
        return f"rope_type={ropes[0]!r} changes with the longest position that a rank sees; scale it in another way"
    if type(model).__name__.endswith(_ONE_TOKEN_HEADS):
        return f"{type(model).__name__} reads one token of the sequence; gather the hidden states with unshard instead"
    if any(name.endswith("pooler") and part is not None for name, part in model.named_modules()):
        return "the model pools the first token, which one rank holds; make it with add_pooling_layer=False"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """All values of rope_type, where layers differ those of each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    found = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return found.union(*(_rope_types(part) for part in parameters.values()))


def _outermost(module: nn.Module, kind: type) -> list[nn.Module]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]
