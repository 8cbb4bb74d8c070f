"""The mask and the attention function of ringspan.hf by themselves, against dense masks and the oracle."""

from __future__ import annotations

import hf_models
import numpy as np
import oracle
import pytest
import torch

import ringspan as rs

pytestmark = hf_models.needs_transformers


def by_attention(mask, columns):
    """Which pairs a StructuredMask keeps: with equal scores, values that name their column show it."""
    batch, _, rows, keys = mask.shape
    query, key = torch.zeros(batch, 1, rows, 4), torch.zeros(batch, 1, keys, 4)
    value = torch.eye(keys)[None, None].expand(batch, 1, keys, keys)
    assert columns == keys
    return rs.attention(query, key, value, mask=mask.mask, attn_mask=mask.keep) > 0


def test_every_mask_function_keeps_the_same_pairs():
    """The structured masks against transformers' own dense ones, over lengths and offsets."""
    from ringspan.hf.masks import make_mask
    from transformers import masking_utils as made

    generator = torch.Generator().manual_seed(2)
    no_padding = torch.zeros(2, dtype=torch.int64)
    functions = {
        "causal": made.causal_mask_function,
        "full": made.bidirectional_mask_function,
        "window": made.sliding_window_causal_mask_function(3),
        "window of one": made.sliding_window_causal_mask_function(1),
        "window of none": made.sliding_window_causal_mask_function(0),
        "both sides": made.sliding_window_bidirectional_mask_function(2),
        "chunks": made.chunked_causal_mask_function(4, no_padding),
        "chunks behind padding": made.chunked_causal_mask_function(4, torch.tensor([3, 0])),
        "unknown": made.or_masks(made.causal_mask_function, lambda b, h, q, k: k < 3),
    }
    for q_len, kv_len, q_offset, kv_offset in [(9, 9, 0, 0), (9, 14, 0, 0), (4, 9, 5, 0), (1, 9, 8, 0), (3, 7, 6, 2)]:
        padding = torch.rand(2, kv_len + kv_offset, generator=generator) > 0.3
        for name, function in functions.items():
            for given in (None, padding):
                arguments = (2, q_len, kv_len, q_offset, kv_offset, function, given)
                expected = made.sdpa_mask(*arguments, allow_is_causal_skip=False)
                found = by_attention(make_mask(*arguments), kv_len)
                assert torch.equal(found, expected), (name, q_len, kv_len, q_offset, kv_offset, given is not None)


def test_every_mask_function_of_packed_documents():
    from ringspan.hf.masks import make_mask
    from transformers import masking_utils as made

    generator = torch.Generator().manual_seed(3)
    for begin in (0, 2):
        lengths = [3, 7, 1, 5]
        positions = torch.cat([torch.arange(begin, begin + length) for length in lengths])[None].expand(2, -1)
        ids = made.find_packed_sequence_indices(positions)
        for base in (
            made.causal_mask_function,
            made.sliding_window_causal_mask_function(3),
            made.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
        ):
            function = made.and_masks(
                made.remap_positions_for_packed_sequence(base, positions), made.packed_sequence_mask_function(ids)
            )
            for given in (None, torch.rand(2, 16, generator=generator) > 0.3):
                expected = made.sdpa_mask(2, 16, 16, 0, 0, function, given, allow_is_causal_skip=False)
                assert torch.equal(by_attention(make_mask(2, 16, 16, 0, 0, function, given), 16), expected)


def call_attention(module=None, mask=None, rows=6, keys=6, **given):
    from ringspan.hf.attention import attend

    generator = torch.Generator().manual_seed(4)
    drawn = [
        torch.randn(1, heads, length, 8, generator=generator) for heads, length in ((4, rows), (2, keys), (2, keys))
    ]
    module = module or torch.nn.Module()
    return drawn, attend(module, *drawn, mask, **given)[0].transpose(1, 2)


def causal_of(rows, window=None):
    from ringspan.hf.masks import make_mask
    from transformers import masking_utils as made

    function = made.sliding_window_causal_mask_function(window) if window else made.causal_mask_function
    return make_mask(1, rows, rows, mask_function=function)


def test_dropout_sinks_softcap_and_scale_against_the_oracle():
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], requires_grad=True)
    torch.manual_seed(11)
    seed = int(torch.randint(2**63 - 1, (1,), dtype=torch.int64))
    torch.manual_seed(11)
    drawn, out = call_attention(
        mask=causal_of(6), dropout=0.4, s_aux=sinks, softcap=1.5, scaling=0.7, deterministic=True, use_cache=False
    )
    out.square().sum().backward()
    q, k, v = (part.double().numpy() for part in drawn)
    keep = np.tril(np.ones((1, 6, 6), bool))
    dropped = oracle.dropped_pairs(0.4, seed, 0, (1, 4, 6, 6))
    given = {
        "scale": 0.7,
        "sink": sinks.detach().double().numpy(),
        "softcap": 1.5,
        "dropped": dropped,
        "dropout_p": 0.4,
    }
    expected = oracle.attend(q, k, v, keep, **given)
    assert oracle.error(out.detach().numpy(), expected.out) <= 1e-5
    expected = oracle.attend(q, k, v, keep, dout=2 * expected.out, **given)
    assert oracle.error(sinks.grad.numpy(), expected.dsink) <= 5e-5


def test_a_position_bias_is_added():
    bias = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(6))
    drawn, out = call_attention(mask=causal_of(6), position_bias=bias)
    q, k, v = (part.double().numpy() for part in drawn)
    expected = oracle.attend(q, k, v, np.tril(np.ones((1, 6, 6), bool)), bias=bias.double().numpy())
    assert oracle.error(out.numpy(), expected.out) <= 1e-5


def test_layers_without_a_mask():
    causal, bidirectional = torch.nn.Module(), torch.nn.Module()
    causal.is_causal, bidirectional.is_causal = True, False
    whole, told = np.ones((1, 6, 6), bool), torch.tensor([0, 2, 6])
    document = np.arange(6) >= 2
    packed = {"cu_seq_lens_q": told, "cu_seq_lens_k": told}
    for module, given, rows, keys, keep in (
        (causal, {}, 6, 6, np.tril(whole)),
        (causal, {"is_causal": False}, 6, 6, whole),
        (bidirectional, {}, 4, 6, whole[:, :4]),
        (causal, {}, 1, 6, whole[:, :1]),
        (bidirectional, packed, 6, 6, (document[:, None] == document[None, :])[None]),
        (causal, packed, 6, 6, np.tril(document[:, None] == document[None, :])[None]),
    ):
        drawn, out = call_attention(module, None, rows, keys, **given)
        expected = oracle.attend(*(part.double().numpy() for part in drawn), keep)
        assert oracle.error(out.numpy(), expected.out) <= 1e-5


def test_bad_arguments_of_a_layer():
    causal = torch.nn.Module()
    causal.is_causal = True
    for given, kind, match in (
        ({"mask": causal_of(6), "block_indices": torch.zeros(1)}, NotImplementedError, "attention block_indices"),
        ({"mask": causal_of(6), "output_attentions": True}, NotImplementedError, "output_attentions"),
        ({"mask": causal_of(5)}, ValueError, "made for 5 queries and 5 keys, but the layer has 6 and 6"),
        ({"mask": causal_of(6), "is_causal": False}, ValueError, "is_causal=False, but the mask keeps"),
        ({"mask": causal_of(6, window=3), "sliding_window": 4}, ValueError, "sliding_window=4, but the mask keeps"),
        ({"mask": causal_of(6), "sliding_window": 4}, ValueError, "sliding_window=4, but the mask keeps"),
        ({"mask": None, "module": causal, "sliding_window": 4}, NotImplementedError, "without a mask"),
        ({"mask": None, "module": causal, "keys": 8}, ValueError, "has 6 queries and 8 keys"),
        ({"mask": None}, ValueError, "does not say is_causal"),
        ({"mask": torch.ones(1, 6)}, ValueError, r"attention_mask has shape \[1, 6\]"),
        ({"mask": "causal"}, NotImplementedError, "attention_mask is of str"),
        ({"mask": causal_of(6), "dropout": 1.0}, ValueError, "dropout_p"),
        ({"mask": causal_of(6), "s_aux": torch.zeros(3)}, ValueError, "sink has shape"),
    ):
        with pytest.raises(kind, match=match):
            call_attention(**given)
    call_attention(mask=causal_of(6), sliding_window=6, block_indices=None, output_attentions=False)
