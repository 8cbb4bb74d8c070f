"""Tiny models of transformers, twice with the same weights: eager attention, which is the judge, and ringspan's."""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch

# Models come from configurations alone; nothing is looked up elsewhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCABULARY = 64
# Relative to the largest value: what fp32 sums in another order.
LOGITS, GRADIENTS = 2e-5, 2e-4
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ENCODER = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
# The configuration of each model type, beyond the sizes.
MODELS = {
    "bert": _ENCODER,
    "gemma": {},
    "gemma2": {**_MIXED, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": _MIXED,
    "gpt_oss": {**_MIXED, **_EXPERTS},
    "granite": {"attention_multiplier": 0.3},
    "llama": {},
    "llama4_text": {
        "attention_chunk_size": 5,
        "attn_temperature_tuning": False,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
        **_EXPERTS,
    },
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": None, **_EXPERTS},
    "modernbert": {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    "olmo2": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "roberta": _ENCODER,
    "smollm3": {},
}
ENCODERS = ("bert", "modernbert", "roberta")
DECODERS = tuple(name for name in MODELS if name not in ENCODERS)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the package transformers is not installed (tools/requirements-models.txt names it)",
)


def config_of(name, **changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(name, **{**_SIZES, **MODELS[name], **changes})


def pair_of(name, seed=0, **changes):
    """(eager, ringspan), in evaluation mode."""
    import ringspan.hf

    ringspan.hf.register()
    torch.manual_seed(seed)
    eager = model_of(config_of(name, **changes), "eager")
    ours = model_of(config_of(name, **changes), "ringspan")
    return eager, with_weights_of(ours, eager)


def model_of(config, implementation, kind=None):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    kind = kind or (AutoModelForMaskedLM if config.model_type in ENCODERS else AutoModelForCausalLM)
    return kind.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()


def with_weights_of(model, other):
    model.load_state_dict(other.state_dict())
    # Weights of 0.02 would make every softmax flat, and every mask look right.
    with torch.no_grad():
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            if one.dim() > 1 and one is not two:
                two.mul_(4)
                one.copy_(two)
    return model


def tokens(batch, length, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def token_losses(logits, targets):
    """[B, S]; `targets` likewise."""
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def positions_of(name, positions):
    """position_ids as the model type counts them: RoBERTa begins behind its padding token."""
    return positions + 1 if name == "roberta" else positions


def no_cache(name):
    return {} if name in ENCODERS else {"use_cache": False}


def difference(one, other):
    """Largest difference over the largest value of `other`."""
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))


def left_padded(batch, length, pad):
    valid = torch.ones(batch, length, dtype=torch.int64)
    valid[0, :pad] = 0
    return valid
