"""`ringspan.hf.context_parallel` on one rank: what is refused, and that nothing is left behind."""

from __future__ import annotations

import hf_models
import pytest
import torch
from hf_models import LOGITS, difference, left_padded, pair_of, tokens

import ringspan as rs

pytestmark = hf_models.needs_transformers


def test_bad_contexts():
    """What one rank can show; test_hf_cp.py has the ranks."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BartConfig

    _, llama = pair_of("llama")
    eager, other = pair_of("qwen2")
    smap = rs.ShardMap.contiguous(9, 1)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    pooled = hf_models.model_of(hf_models.config_of("bert"), "ringspan", AutoModel)
    classifier = hf_models.model_of(hf_models.config_of("llama"), "ringspan", AutoModelForSequenceClassification)
    cross = hf_models.model_of(BartConfig(d_model=16), "ringspan", AutoModel)
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    mamba = hf_models.model_of(AutoConfig.for_model("mamba", **small), "ringspan")
    _, by_length = pair_of("llama", rope_parameters=rope)
    for model, changes, kind, match in (
        (torch.nn.Linear(2, 2), {}, ValueError, "holds 0 transformers models"),
        ("llama", {}, ValueError, "model is of str"),
        (torch.nn.ModuleList([llama, other]), {}, ValueError, "holds 2 transformers models"),
        (eager, {}, ValueError, "attn_implementation='eager'"),
        (
            llama,
            {"shard_map": rs.ShardMap.contiguous(9, 2)},
            ValueError,
            "shard_map splits over 2 ranks, but group=None is this process alone",
        ),
        (llama, {"shard_map": 9}, ValueError, "shard_map is of int"),
        (llama, {"shard_map": rs.ShardMap.contiguous(0, 1)}, ValueError, "rank 0 holds no token"),
        (llama, {"documents": [5, 5]}, ValueError, "whose sum is at most the 9 positions"),
        (by_length, {}, NotImplementedError, "rope_type='dynamic'"),
        (cross, {}, NotImplementedError, "cross attention"),
        (mamba, {"assume_token_wise": True}, NotImplementedError, "layer_types linear_attention mix tokens"),
        (pooled, {}, NotImplementedError, "pools the first"),
        (classifier, {}, NotImplementedError, "reads one token"),
    ):
        given = {"group": None, "shard_map": smap, **changes}
        with pytest.raises(kind, match=match), rs.hf.context_parallel(model, **given):
            pass
    assert llama(input_ids=tokens(1, 4)).logits.shape == (1, 4, hf_models.VOCABULARY)


class Mixing(torch.nn.Module):
    """A layer that mixes tokens without attention."""

    def forward(self, hidden_states, **others):
        return hidden_states.cumsum(dim=1)


def test_models_that_are_not_checked():
    _, granite = pair_of("granite")
    smap = rs.ShardMap.contiguous(9, 1)
    given = {"input_ids": tokens(1, 9), "position_ids": torch.arange(9)[None]}
    granite.config.model_type = "another"
    with (
        pytest.raises(NotImplementedError, match="model_type='another' has not been checked"),
        rs.hf.context_parallel(granite, group=None, shard_map=smap),
    ):
        pass
    with rs.hf.context_parallel(granite, group=None, shard_map=smap, assume_token_wise=True):
        granite(**given)
        granite.model.layers[1] = Mixing()
        with pytest.raises(NotImplementedError, match="3 layers and made 2 attention calls"):
            granite(**given)


def test_bad_calls_in_a_context():
    eager, ours = pair_of("llama")
    smap = rs.ShardMap.contiguous(9, 1)
    right = {"input_ids": tokens(1, 9), "position_ids": torch.arange(9)[None]}
    packed = torch.cat([torch.arange(4), torch.arange(5)])[None]
    for given, kind, match in (
        ({"position_ids": None}, ValueError, "position_ids are missing"),
        ({"position_ids": packed}, ValueError, "entry 0 hold 0 at position 4, where 4 comes next"),
        ({"position_ids": torch.arange(8)[None]}, ValueError, r"position_ids is \[1, 8\]"),
        ({"attention_mask": torch.ones(1, 1, 9, 9)}, ValueError, r"attention_mask is \[1, 1, 9, 9\]"),
        ({"attention_mask": {"full_attention": None}}, ValueError, "attention_mask is dict"),
        ({"input_ids": tokens(1, 8)}, ValueError, "this rank's rows"),
        ({"labels": tokens(1, 9)}, NotImplementedError, "masked_mean_loss"),
        ({"use_cache": True}, NotImplementedError, "generate on one rank"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, NotImplementedError, "documents=lengths"),
        ({"logits_to_keep": 1}, NotImplementedError, "logits_to_keep"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions"),
    ):
        with rs.hf.context_parallel(ours, group=None, shard_map=smap), pytest.raises(kind, match=match):
            ours(**{**right, **given})
    with (
        rs.hf.context_parallel(ours, group=None, shard_map=smap, documents=[[9], [9]]),
        pytest.raises(ValueError, match="lengths of 2 entries, but the batch has 1"),
    ):
        ours(**right)
    with rs.hf.context_parallel(ours, group=None, shard_map=smap):
        with pytest.raises(NotImplementedError, match="generate on one rank"):
            ours.generate(tokens(1, 9), max_new_tokens=2)
        assert difference(ours(**right).logits, eager(input_ids=tokens(1, 9)).logits) <= LOGITS


def test_masks_that_no_context_can_say():
    chunked, both_sides = pair_of("llama4_text")[1], pair_of("gemma3_text", use_bidirectional_attention=True)[1]
    given = {"input_ids": tokens(1, 9), "position_ids": torch.arange(9)[None]}
    smap = rs.ShardMap.contiguous(9, 1)
    with (
        rs.hf.context_parallel(chunked, group=None, shard_map=smap, assume_token_wise=True),
        pytest.raises(NotImplementedError, match="chunked attention with padding on the left"),
    ):
        chunked(attention_mask=left_padded(1, 9, 2), **given)
    with (
        rs.hf.context_parallel(both_sides, group=None, shard_map=smap),
        pytest.raises(NotImplementedError, match=r"the mask function .* is none that ringspan.hf can say"),
    ):
        both_sides(**given)


def test_contexts_nest_and_are_left_in_any_order():
    eager, ours = pair_of("llama")
    _, other = pair_of("qwen2")
    right = {"input_ids": tokens(1, 9), "position_ids": torch.arange(9)[None]}
    expected = eager(input_ids=tokens(1, 9)).logits

    def context(model, length=9):
        return rs.hf.context_parallel(model, group=None, shard_map=rs.ShardMap.contiguous(length, 1))

    with context(ours, length=4):
        with context(ours):
            assert difference(ours(**right).logits, expected) <= LOGITS
            with pytest.raises(ValueError, match="was not given to the innermost"):
                other(**right)
            with pytest.raises(ValueError, match="was not given to the innermost"):
                ours.model(**right)
        with pytest.raises(ValueError, match="this rank's rows"):
            ours(**right)
        with pytest.raises(IndexError, match="out of range"):  # an error of the model's own
            ours(input_ids=torch.full((1, 4), 99), position_ids=torch.arange(4)[None])
    outer, inner = context(other), context(ours)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert difference(ours(**right).logits, expected) <= LOGITS
    with pytest.raises(ValueError, match="position_ids are missing"):
        ours(input_ids=tokens(1, 9))
    inner.__exit__(None, None, None)
    assert difference(ours(input_ids=tokens(1, 9)).logits, expected) <= LOGITS


def test_compiled_models():
    eager, ours = pair_of("llama", num_hidden_layers=1)
    compiled = torch.compile(ours, backend="aot_eager")
    ids, valid = tokens(2, 9), left_padded(2, 9, 3)
    found = compiled(input_ids=ids, attention_mask=valid, use_cache=False).logits
    expected = eager(input_ids=ids, attention_mask=valid, use_cache=False).logits
    assert difference(found[valid.bool()], expected[valid.bool()]) <= LOGITS
    smap = rs.ShardMap.contiguous(9, 1)
    with rs.hf.context_parallel(compiled, group=None, shard_map=smap):
        found = compiled(input_ids=ids, position_ids=torch.arange(9)[None]).logits
    assert difference(found, eager(input_ids=ids, use_cache=False).logits) <= LOGITS
