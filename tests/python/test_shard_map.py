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
        (lambda: rs.ShardMap.striped(8, 2).unshard(torch.zeros(4), dim=0), "1 ranks.*2"),
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


@pytest.mark.parametrize("name", ["per_document", "balanced"])
def test_not_offered_yet(name):
    arguments = ([4, 4], 2) if name == "per_document" else (rs.causal(), 8, 2)
    with pytest.raises(NotImplementedError, match=name):
        getattr(rs.ShardMap, name)(*arguments)
