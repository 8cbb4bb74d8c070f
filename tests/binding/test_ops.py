"""The dispatcher ops by themselves, in one process: what a spec may hold, the inner ops, the plan cache, threads."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
import ringspan._ops  # noqa: F401  loads the library
import torch

OPS = torch.ops.ringspan
FULL, CAUSAL, WINDOW, CHUNKED, PREFIX, LENGTHS, IDS, BANDS, AND, OR = range(10)
TOP_LEFT, BOTTOM_RIGHT = 1, 2
SHAPES = {
    "BNSD": lambda b, n, s, d: (b, n, s, d),
    "BSND": lambda b, n, s, d: (b, s, n, d),
    "BSH": lambda b, n, s, d: (b, s, n * d),
    "SBH": lambda b, n, s, d: (s, b, n * d),
}


def spec_of(seq_len, mask, world=1, batch=1, maps=(0, 0, 0, 0)):
    return [1, world, batch, seq_len, seq_len, *maps, *mask]


def call(seq_len, mask, tables=(), batch=1, width=4, **changes):
    """One head; keys are zero, so that a row of out is the mean of the value rows that it keeps."""
    zeros = torch.zeros(batch, 1, seq_len, width, dtype=torch.float64)
    value = torch.eye(seq_len, dtype=torch.float64).expand(batch, 1, -1, -1)
    arguments = {
        "query": zeros,
        "key": zeros,
        "value": value,
        "spec": spec_of(seq_len, mask, batch=batch),
        "tables": list(tables),
        "scale": 1.0,
        "layout": "BNSD",
        "num_heads": 1,
        "group_name": "",
        "schedule": "auto",
        "exchange": "auto",
        "assume_agreed": False,
    }
    return OPS.attention(**(arguments | changes))


def kept(seq_len, mask, tables=(), batch=1):
    """The mask as the kernel saw it, bool [batch, seq_len, seq_len]."""
    return (call(seq_len, mask, tables, batch)[0] > 0)[:, 0]


def by_rule(seq_len, rule):
    return torch.tensor([[rule(i, j) for j in range(seq_len)] for i in range(seq_len)])


def causal_in_documents(ids):
    return by_rule(len(ids), lambda i, j: ids[i] == ids[j] != 0 and j <= i)


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        ([FULL], lambda i, j: True),
        ([CAUSAL, TOP_LEFT], lambda i, j: j <= i),
        ([CAUSAL, BOTTOM_RIGHT], lambda i, j: j <= i),
        ([WINDOW, 2, 1, TOP_LEFT], lambda i, j: i - 2 <= j <= i + 1),
        ([WINDOW, -1, 0, TOP_LEFT], lambda i, j: j <= i),
        ([CHUNKED, 3, TOP_LEFT], lambda i, j: i // 3 == j // 3 and j <= i),
        ([CAUSAL, 1, WINDOW, 2, 2, 1, AND], lambda i, j: i - 2 <= j <= i),
        ([WINDOW, 0, 0, 1, CHUNKED, 4, 1, OR], lambda i, j: i // 4 == j // 4 and j <= i),
        ([CAUSAL, 1, WINDOW, 1, 1, 1, AND, CHUNKED, 5, 1, OR],
         lambda i, j: i - 1 <= j <= i or (i // 5 == j // 5 and j <= i)),
    ],
)  # fmt: skip
def test_masks_of_scalars(mask, rule):
    assert torch.equal(kept(11, mask)[0], by_rule(11, rule))


def test_masks_of_tables():
    ids = [1, 1, 0, 2, 2, 2, 1, 0]
    by_ids = kept(8, [IDS, 0, 1, 0, 0, 0], [torch.tensor([ids])])[0]
    assert torch.equal(by_ids, causal_in_documents(ids))
    lengths = torch.tensor([[3, 0, 4, 0], [2, 6, 0, 0]])
    by_lengths = kept(8, [LENGTHS, 0, 1, 0, 0, 0], [lengths], batch=2)
    assert torch.equal(by_lengths[0], causal_in_documents([1, 1, 1, 2, 2, 2, 2, 0]))
    assert torch.equal(by_lengths[1], causal_in_documents([1, 1, 2, 2, 2, 2, 2, 2]))
    prefix = kept(8, [PREFIX, 0, TOP_LEFT], [torch.tensor([3])])[0]
    assert torch.equal(prefix, by_rule(8, lambda i, j: j <= i or j < 3))
    band = kept(8, [BANDS, 0], [torch.tensor([[1, 5, 2, 7, -1, 2]])])[0]
    assert torch.equal(band, by_rule(8, lambda i, j: 1 <= i < 5 and 2 <= j < 7 and -1 <= j - i <= 2))


def test_tables_need_not_be_dense():
    ids = torch.tensor([[1, 9], [1, 9], [2, 9], [2, 9]]).t()[:1]
    assert ids.stride(1) == 2
    assert torch.equal(kept(4, [IDS, 0, 1, 0, 0, 0], [ids])[0], causal_in_documents([1, 1, 2, 2]))


@pytest.mark.parametrize(
    ("spec", "tables", "message"),
    [
        ([1, 1, 1, 4], [], "has 4 values"),
        ([2, *spec_of(4, [FULL])[1:]], [], "version is 2"),
        (spec_of(4, []), [], "has 9 values"),
        (spec_of(4, [77]), [], "mask code 77"),
        (spec_of(4, [CAUSAL]), [], "corner should follow"),
        (spec_of(4, [CAUSAL, 3]), [], "corner is 3"),
        (spec_of(4, [AND]), [], "0 operands"),
        (spec_of(4, [FULL, AND]), [], "1 operands"),
        (spec_of(4, [FULL, FULL]), [], "leaves 2 masks"),
        (spec_of(4, [LENGTHS, 0, 1, 0, 0, 0]), [], "table 0, and 0 tables"),
        (spec_of(4, [LENGTHS, 0, 1, 0, 0, 0]), [torch.tensor([4])], "has 1 dimensions; it must have 2"),
        (spec_of(4, [LENGTHS, 0, 9, 0, 0, 0]), [torch.tensor([[4]])], "inside documents is 9"),
        (spec_of(4, [IDS, 0, 1, 0, 0, 0]), [torch.tensor([[1, 1, 1]])], "3 were given for a sequence of 4"),
        (spec_of(4, [BANDS, 0]), [torch.zeros(2, 5, dtype=torch.int64)], "5 columns; it must have 6"),
        (spec_of(4, [BANDS, 0]), [torch.zeros(2, 6)], "tables are int64"),
        (spec_of(4, [FULL], maps=(9, 0, 0, 0)), [], "shard map kind 9"),
        (spec_of(4, [FULL], maps=(3, 0, 0, 0)), [torch.tensor([3])], "add up to 3 positions"),
        (spec_of(4, [FULL], maps=(3, 0, 0, 0)), [torch.tensor([2, 2])], "2 were given for 1 ranks"),
        (spec_of(4, [FULL], maps=(4, 0, 0, 0)), [torch.tensor([[0, 5, 0, 0, 4, 1]]), torch.tensor([4])], "rank 5"),
        (spec_of(4, [FULL], world=2), [], "for 2 ranks and the group has 1"),
        (spec_of(4, [FULL], batch=3), [], "batch is 1 in query and 3"),
    ],
)
def test_a_wrong_spec_is_refused(spec, tables, message):
    with pytest.raises(ValueError, match=message):
        call(4, [FULL], tables, spec=spec)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": "BNSX"}, ValueError, "BNSX"),
        ({"exchange": "mail"}, ValueError, "mail"),
        ({"schedule": "spiral"}, ValueError, "spiral"),
        ({"num_heads": 2}, ValueError, "1 in query and 2"),
        ({"scale": float("inf")}, ValueError, "inf"),
        ({"group_name": "nobody"}, ValueError, "nobody"),
        ({"query": torch.zeros(1, 1, 5, 4, dtype=torch.float64)}, ValueError, "5 rows on rank 0"),
        ({"key": torch.zeros(1, 1, 4, 4)}, ValueError, "query is Double and key is Float"),
        ({"key": torch.zeros(1, 1, 4, 5, dtype=torch.float64)}, ValueError, "4 in query and 5 in key"),
        ({"value": torch.zeros(1, 1, 3, 4, dtype=torch.float64)}, ValueError, "key has 4 rows and value 3"),
        ({"query": torch.zeros(1, 4, 4, dtype=torch.float64)}, ValueError, "3 dimensions"),
    ],
)
def test_a_wrong_argument_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        call(4, [FULL], **changes)


def test_positions_and_work():
    maps = (4, 0, 2, 0)
    tables = [torch.tensor([[0, 0, 1, 4, 2, 1], [0, 1, 0, 0, 2, 2]]), torch.tensor([4, 2])]
    spec = spec_of(6, [CAUSAL, TOP_LEFT], world=2, batch=3, maps=maps)
    assert OPS._positions(spec, tables, 0, 0, 0).tolist() == [-1, 4, 5, -1]
    assert OPS._positions(spec, tables, 0, 1, 0).tolist() == [0, 2]
    assert OPS._positions(spec, tables, 1, 1, 0).tolist() == [1, 3, 5]
    assert OPS._work(spec, tables) == [3 * (5 + 6), 3 * (1 + 3)]


def test_sent_bytes_by_hand():
    # 8 positions on 2 ranks, 2 KV heads, K and V rows of 3 + 5 elements in bf16, their gradients in fp32.
    def sent(exchange):
        spec = spec_of(8, [FULL], world=2)
        text = OPS._ledger_json(spec, [], 4, 2, 3, 5, "bf16", 1.0, "BNSD", "auto", exchange, 1)
        return [json.loads(text)[direction]["sent_bytes"] for direction in ("forward", "backward")]

    shard = 4 * 2 * (3 + 5)
    assert sent("all_to_all") == [shard * 2, shard * 2 + 2 * shard * 4]
    assert sent("p2p") == [shard * 2, shard * 2 + shard * 4]
    assert sent("all_gather") == [shard * 2, shard * 2 + shard * 4]


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_sink", [False, True])
def test_meta_and_eager_agree(layout, dtype, with_sink):
    shape = SHAPES[layout]
    sizes = [shape(2, 4, 6, 8), shape(2, 2, 6, 8), shape(2, 2, 6, 5)]
    rest = (spec_of(6, [CAUSAL, TOP_LEFT], batch=2), [], 0.5, layout, 4, "")

    def both_passes(device):
        tensors = [torch.ones(size, dtype=dtype, device=device) for size in sizes]
        sink = torch.ones(4, device=device) if with_sink else None
        forward = OPS.attention_forward(*tensors, *rest, sink=sink, needs_grad=True)
        out, _, _, lse, number = forward
        return [*forward, *OPS.attention_backward(out, None, out, lse, number, *tensors, *rest, sink=sink)]

    eager = both_passes("cpu")
    assert eager[0].shape == torch.Size(shape(2, 4, 6, 5))
    assert eager[8].shape == torch.Size([4] if with_sink else [0])
    for got, expected in zip(both_passes("meta"), eager, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_opcheck_of_the_inner_ops():
    query, key, value = (torch.randn(1, heads, 5, 4) for heads in (4, 2, 2))
    rest = (
        spec_of(5, [IDS, 0, 1, 0, 0, 0]),
        [torch.tensor([[1, 1, 0, 2, 2]])],
        0.5,
        "BNSD",
        4,
        "",
        "ring",
    )
    for sink in (None, torch.randn(4)):
        inputs, given = (query, key, value), {"sink": sink}
        torch.library.opcheck(OPS.attention_forward.default, (*inputs, *rest), given | {"needs_grad": True})
        out, _, _, lse, number = OPS.attention_forward(*inputs, *rest, sink=sink, needs_grad=True)
        for grads in ((torch.randn_like(out), None), (None, torch.randn(1, 4, 5)), (None, None)):
            saved = (*grads, out, lse, number, *inputs, *rest)
            torch.library.opcheck(OPS.attention_backward.default, saved, given)


def test_opcheck_with_everything_that_changes_pairs():
    query, key, value = (torch.randn(1, heads, 5, 4) for heads in (4, 2, 2))
    rest = (spec_of(5, [FULL]), [], 0.5, "BNSD", 4, "")
    pairs = {"bias": torch.randn(4, 5, 5), "attn_mask": torch.rand(5, 5) > 0.3, "slopes": torch.rand(4)}
    numbers = {"softcap": 2.0, "dropout_p": 0.25, "offset": 3, "total_heads": 4}
    seed = {"seed": torch.tensor([9])}
    forward = (query, key, value, *rest)
    torch.library.opcheck(OPS.attention_forward.default, forward, pairs | numbers | seed)
    out, _, _, lse, called = OPS.attention_forward(*forward, **pairs, **numbers, **seed)
    assert called.tolist() == [0, 9]
    backward = (torch.randn_like(out), None, out, lse, called, query, key, value, *rest)
    torch.library.opcheck(OPS.attention_backward.default, backward, pairs | numbers | {"wants_bias": True})


def test_plans_are_found_by_content():
    built = lambda: OPS._plan_cache_counts()[1]  # noqa: E731
    ids = torch.randint(1, 9, (1, 50))
    documents = [IDS, 0, 1, 0, 0, 0]
    call(50, documents, [ids])
    before = built()
    call(50, documents, [ids.clone()])
    assert built() == before
    changed = ids.clone()
    changed[0, 49] += 1
    call(50, documents, [changed])
    call(50, documents, [ids], scale=0.25)
    assert built() == before + 2
    ids[0, 0] += 1  # the same memory with other content
    assert torch.equal(kept(50, documents, [ids])[0], causal_in_documents(ids[0].tolist()))
    assert built() == before + 3


def test_the_plan_cache_is_bounded():
    for seq_len in range(1, 100):
        call(seq_len, [CAUSAL, TOP_LEFT])
    assert OPS._plan_cache_counts()[0] <= 64


def test_two_threads_of_pytorch_run():
    code = (
        "import torch; torch.set_num_threads(2); import ringspan._ops;"
        "assert torch.ops.ringspan._threads_of_parallel_run(16) == 2;"
        "torch.set_num_threads(1); assert torch.ops.ringspan._threads_of_parallel_run(16) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_instruction_sets_by_name():
    names = OPS._available_isas()
    try:
        for name in names:
            OPS._force_isa(name)
            assert OPS._isa() == name
    finally:
        OPS._force_isa("")
    with pytest.raises(ValueError, match="mmx"):
        OPS._force_isa("mmx")


def test_counters_start_at_zero_without_a_group():
    query = torch.randn(1, 1, 4, 4)
    for needs_grad, agreed in itertools.product((False, True), repeat=2):
        rest = (spec_of(4, [FULL]), [], 1.0, "BNSD", 1, "")
        given = {"assume_agreed": agreed, "needs_grad": needs_grad}
        assert OPS.attention_forward(query, query, query, *rest, **given)[4].tolist() == [0, 0]
