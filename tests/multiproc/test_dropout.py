"""Dropout: the same pairs under every split, forward and backward, and seeds on which ranks agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringspan import names

EXCHANGES = names.EXCHANGES[1:]  # without auto


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a15_dropout(pool, world, exchange):
    for split in ("contiguous", "head_tail", "striped"):
        for answer in pool.run("dropout_jobs:a15", world, split=split, exchange=exchange):
            assert answer["weights"] <= 2e-6
            assert answer["dv"] <= 5e-6
            assert answer["p of 0"] == 0


@pytest.mark.parametrize("world", [1, 2])
def test_a15_share_of_zeros(pool, world):
    for share in pool.run("dropout_jobs:share_of_zeros", world, seeds=1000):
        assert abs(share - 0.5) <= 0.02


@pytest.mark.parametrize("world", [1, 2, 4])
def test_drawn_seeds_are_those_of_rank_0(pool, world):
    answers = pool.run("dropout_jobs:drawn_seeds", world)
    for first, second, third in answers:
        assert np.array_equal(first, third)
        assert not np.array_equal(first == 0, second == 0)
        assert np.array_equal(first, answers[0][0])


def test_given_seeds_that_differ_are_refused(pool):
    for message in pool.run("dropout_jobs:given_seeds_that_differ", 3):
        assert "seed is 20 on rank 0, 21 on rank 1, 22 on rank 2" in message


def test_ranks_that_vouch_need_a_seed(pool):
    for message in pool.run("dropout_jobs:vouched_without_a_seed", 2):
        assert "give all one seed" in message


def _identity_call(heads: slice, batch: slice, **arguments):
    """The weights of a part of a call of 3 batch entries and 4 heads."""
    import ringspan as rs

    torch.manual_seed(0)
    q, k = torch.randn(3, 4, 5, 8), torch.randn(3, 4, 5, 8)
    v = torch.eye(5).expand(3, 4, 5, 5)
    return rs.attention(q[batch, heads], k[batch, heads], v[batch, heads], dropout_p=0.5, seed=9, offset=2, **arguments)


def test_parts_of_a_call_draw_what_the_whole_draws():
    every = slice(None)
    undivided = _identity_call(every, every)
    for first in (0, 2):
        part = _identity_call(slice(first, first + 2), every, head_offset=first, total_heads=4)
        assert torch.equal(part, undivided[:, first : first + 2])
    for first in (0, 1, 2):
        part = _identity_call(every, slice(first, first + 1), batch_offset=first)
        assert torch.equal(part, undivided[first : first + 1])
    part = _identity_call(slice(3, 4), slice(2, 3), batch_offset=2, head_offset=3, total_heads=4)
    assert torch.equal(part, undivided[2:3, 3:4])
    # Without a total where none is needed.
    assert torch.equal(_identity_call(slice(1, 3), slice(0, 1), head_offset=1), undivided[:1, 1:3])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_calls_in_one_compiled_graph_differ(backend):
    import ringspan as rs

    q = torch.randn(1, 2, 16, 8)

    @torch.compile(fullgraph=True, backend=backend)
    def twice(q):
        return rs.attention(q, q, q, dropout_p=0.5), rs.attention(q, q, q, dropout_p=0.5)

    first, second = twice(q)
    assert not torch.equal(first, second)
    again, _ = twice(q)
    assert not torch.equal(first, again)
    for value in (first, second, again):
        assert value.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_its_draw(reentrant):
    from torch.utils.checkpoint import checkpoint

    import ringspan as rs

    def gradients(wrap):
        torch.manual_seed(3)
        q = torch.randn(1, 2, 16, 8, requires_grad=True)

        def body(q):
            return rs.attention(q * 1.5, q, q + 1, dropout_p=0.4).square()

        out = checkpoint(body, q, use_reentrant=reentrant) if wrap else body(q)
        return out, torch.autograd.grad(out.sum(), q)[0] if not reentrant else _backward(out, q)

    plain, checkpointed = gradients(False), gradients(True)
    assert torch.equal(plain[0], checkpointed[0])
    assert torch.equal(plain[1], checkpointed[1])


def _backward(out, q):
    out.sum().backward()
    return q.grad
