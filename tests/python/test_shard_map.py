"""ShardMap without a group: positions, shards, work and refusals."""

import oracle
import pytest
import torch
from cases import map_of

import ringspan as rs

SPLITS = ["contiguous", "head_tail", "striped"]


@pytest.mark.parametrize("split", SPLITS)
def test_positions_by_definition(split):
    for seq_len in range(24):
        for world in range(1, 7):
            smap = map_of((split,), seq_len, world)
            expected = [part.tolist() for part in oracle.holdings((split,), seq_len, world)]
            assert [smap.positions(rank).tolist() for rank in range(world)] == expected
            assert [smap.local_rows(rank) for rank in range(world)] == [len(part) for part in expected]


@pytest.mark.parametrize("split", [*SPLITS, "lengths", "positions"])
def test_the_library_holds_the_same_rows(split):
    """The front's positions against those that C++ decodes from a call."""
    for seq_len, world in ((0, 2), (1, 3), (13, 4), (16, 2)):
        rule = (split,)
        if split == "lengths":
            rule = (split, (0,) * (world - 1) + (seq_len,))
        if split == "positions":
            rule = (split, tuple((-1, *range(rank, seq_len, world)[::-1], -1) for rank in range(world)))
        smap, tables = map_of(rule, seq_len, world), []
        words = smap.encode(tables)
        spec = [1, world, 1, seq_len, seq_len, *words, *words, 0]
        for rank in range(world):
            for which in (0, 1):
                found = torch.ops.ringspan._positions(spec, tables, which, rank, 0)
                assert found.tolist() == smap.positions(rank).tolist()


def test_batch_entries_may_be_split_differently():
    smap = rs.ShardMap.from_segments([[[(0, 0, 3, 1)], [(0, 3, 1, 1)]], [[(0, 0, 4, 2)], [(0, 1, 2, 2)]]], seq_len=8)
    x = torch.arange(16.0).reshape(2, 8)
    assert smap.num_lists == 2
    assert smap.shard(x, 0, 1).tolist() == [[0, 1, 2, 0], [8, 10, 12, 14]]
    assert smap.shard(x, 1, 1).tolist() == [[3, 0], [9, 11]]
    assert smap.shard(x.T, 1, 0, batch_dim=1).T.tolist() == [[3, 0], [9, 11]]
    with pytest.raises(ValueError, match="3 batch entries"):
        smap.shard(torch.zeros(3, 8), 0, 1)


def test_shard_is_differentiable():
    x = torch.randn(2, 7, requires_grad=True)
    rs.ShardMap.head_tail(7, 2).shard(x, 0, 1).sum().backward()
    assert x.grad.tolist() == [[1, 0, 0, 0, 0, 1, 1]] * 2


def test_maps_are_values():
    assert rs.ShardMap.head_tail(7, 2) == rs.ShardMap.head_tail(7, 2) != rs.ShardMap.striped(7, 2)
    assert rs.ShardMap.from_lengths([3, 4]) == rs.ShardMap.from_lengths((3, 4)) != rs.ShardMap.from_lengths([4, 3])
    assert len({rs.ShardMap.striped(8, 2), rs.ShardMap.striped(8, 2)}) == 1


def test_work_counts_pairs():
    keep = oracle.keep_of(("window", 3, 1), 13, 13)[0]
    for split in SPLITS:
        parts = oracle.holdings((split,), 13, 3)
        assert map_of((split,), 13, 3).work(rs.window(3, 1)) == [int(keep[part].sum()) for part in parts]
    assert rs.ShardMap.contiguous(8, 2).work(rs.documents(lengths=[[4, 4], [8, 0]])) == [10 + 10, 10 + 26]


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: rs.ShardMap.contiguous(-1, 2), "-1"),
        (lambda: rs.ShardMap.contiguous(8, 0), "0"),
        (lambda: rs.ShardMap.striped(8.5, 2), "8.5"),
        (lambda: rs.ShardMap.from_lengths([]), "one length"),
        (lambda: rs.ShardMap.from_lengths([3, -1]), "-1"),
        (lambda: rs.ShardMap.from_segments([[(0, 0, 0, 1)]]), "length"),
        (lambda: rs.ShardMap.from_segments([[(0, 0, 2, 0)]]), "stride"),
        (lambda: rs.ShardMap.from_segments([[(-1, 0, 2, 1)]]), "local_row"),
        (lambda: rs.ShardMap.from_segments([[(0, 0, 2, 1)]], local_rows=[2, 2]), "2 entries"),
        (lambda: rs.ShardMap.striped(8, 2).positions(2), "rank 2"),
        (lambda: rs.ShardMap.striped(8, 2).shard(torch.zeros(7), 0, 0), "7 rows.*8"),
        (lambda: rs.ShardMap.striped(8, 2).shard(torch.zeros(8), 0, 1), "dim 1"),
        (lambda: rs.ShardMap.striped(8, 2).unshard(torch.zeros(4), dim=0), "2 ranks.*1 rank"),
        (lambda: rs.ShardMap.striped(8, 1).unshard(torch.zeros(4), dim=0), "4 rows.*8"),
        (lambda: rs.ShardMap.striped(4, 1).unshard(torch.zeros(4, requires_grad=True), dim=0), "grad"),
        (lambda: rs.ShardMap.striped(4, 1).unshard(torch.zeros(4), dim=0, grad="mean"), "mean"),
        (lambda: rs.ShardMap.from_segments([[(0, 1, 2, 1)]]).unshard(torch.zeros(2), dim=0), "held once"),
    ],
)
def test_refusals_name_the_values(make, pattern):
    with pytest.raises(ValueError, match=pattern):
        make()


def test_overlaps_are_refused_before_anything_runs():
    q = torch.randn(1, 1, 4, 8)
    for segments in ([[(0, 0, 3, 1), (2, 3, 2, 1)]], [[(0, 0, 3, 1), (3, 2, 1, 1)]]):
        smap = rs.ShardMap.from_segments(segments, local_rows=[4])
        with pytest.raises(ValueError, match=r"share local rows|held twice"):
            rs.attention(q, q, q, shard_map=smap)


def test_keys_must_be_held_once():
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(ValueError, match=r"held|cover|position"):
        rs.attention(q, q, q, shard_map=rs.ShardMap.from_segments([[(0, 0, 3, 1)]], seq_len=5))


def held_once(smap, batch=0):
    positions = torch.cat([smap.positions(rank, batch) for rank in range(smap.world_size)])
    return sorted(positions[positions >= 0].tolist()) == list(range(smap.seq_len))


def test_per_document_balances_pairs():
    smap = rs.ShardMap.per_document([8, 4], 2)
    assert smap.positions(0).tolist() == [0, 1, 6, 7, 8, 11]
    assert smap.work(rs.documents(lengths=[8, 4])) == [23, 23]
    lengths = [61, 3, 17, 128, 1, 1, 90, 44, 7]
    for world in (2, 3, 5, 8):
        smap = rs.ShardMap.per_document(torch.tensor(lengths), world)
        assert held_once(smap)
        assert smap.imbalance(rs.documents(lengths=lengths)) <= 1.02


def test_per_document_for_each_batch_entry():
    lengths = [[8, 8, 16], [16, 5]]
    smap = rs.ShardMap.per_document(lengths, 3, seq_len=32)
    assert smap.num_lists == 2
    assert held_once(smap, 0)
    assert held_once(smap, 1)
    whole = torch.randn(2, 1, 32, 4)
    found = [smap.shard(whole, rank, dim=2) for rank in range(3)]
    for rank, part in enumerate(found):
        for batch in range(2):
            positions = smap.positions(rank, batch)
            assert torch.equal(part[batch, :, positions >= 0], whole[batch, :, positions[positions >= 0]])


@pytest.mark.parametrize(
    "mask",
    [
        rs.causal(),
        rs.full(),
        rs.window(100),
        rs.prefix(300),
        rs.documents(lengths=[500, 3, 400]),
        rs.bands([(0, 900, 0, 50, -1000, 1000), (200, 300, 100, 800, -300, 400)]),
        rs.prefix([0, 700]),
    ],
)
def test_balanced_reaches_two_percent(mask):
    for world in (2, 4, 7):
        smap = rs.ShardMap.balanced(mask, 1000, world)
        assert held_once(smap)
        assert smap.imbalance(mask) <= 1.02


def test_balanced_says_where_it_cannot():
    mask = rs.bands([(5, 6, 0, 256, -1000, 1000)])
    with pytest.warns(UserWarning, match=r"busiest of 4 ranks has 4.000 times the mean"):
        assert rs.ShardMap.balanced(mask, 256, 4).imbalance(mask) == 4.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rs.ShardMap.per_document([3, -1], 2), r"lengths\[1\] is -1"),
        (lambda: rs.ShardMap.per_document([3, 4], 2, seq_len=6), r"7 tokens and seq_len is 6"),
        (lambda: rs.ShardMap.per_document([3.5], 2), r"contains 3.5"),
        (lambda: rs.ShardMap.per_document([3], 0), r"world_size is 0"),
        (lambda: rs.ShardMap.balanced(rs.causal(), 8, 0), r"world_size is 0"),
        (lambda: rs.ShardMap.balanced(rs.causal(), -1, 2), r"seq_len is -1"),
        (lambda: rs.ShardMap.balanced(rs.documents(lengths=[9]), 8, 2), r"9.*8"),
    ],
)
def test_balancers_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "smap",
    [
        rs.ShardMap.head_tail(5, 4),  # rank 2 holds nothing
        rs.ShardMap.from_lengths([5, 0]),
        rs.ShardMap.from_segments([[[(0, 0, 5, 1)], []], [[(0, 0, 3, 1)], [(0, 3, 2, 1)]]]),
        rs.ShardMap.from_segments([[(0, 0, 5, 1)], []], local_rows=[5, 2]),  # padding alone
    ],
)
def test_every_shard_keeps_the_graph(smap):
    x = torch.randn(smap.num_lists, 5, 3, requires_grad=True)
    shards = [smap.shard(x, rank, dim=1) for rank in range(smap.world_size)]
    assert all(shard.requires_grad for shard in shards)
    sum(shard.sum() for shard in shards).backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    (gradient,) = torch.autograd.grad(smap.shard(x, smap.world_size - 1, dim=1).sum(), x)
    assert gradient.shape == x.shape


def test_a_shard_of_one_dimension_keeps_the_graph():
    x = torch.randn(5, requires_grad=True)
    shard = rs.ShardMap.head_tail(5, 4).shard(x, 2, dim=0)
    assert shard.shape == (0,)
    assert shard.requires_grad
    (gradient,) = torch.autograd.grad(shard.sum(), x)
    assert torch.equal(gradient, torch.zeros(5))
