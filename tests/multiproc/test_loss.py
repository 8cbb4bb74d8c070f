"""A18, the scale of the loss: what is displayed and the gradients apart, with numbers counted by hand too."""

from __future__ import annotations

import pytest

EXACT = 1e-10
# Valid targets of two sequences of 8 on two contiguous ranks: 1 on rank 0, 7 on rank 1; 5 and 3 by sequence.
ONE_AND_SEVEN = ["01001111", "00001101"]


def check(pool, world, **arguments):
    for found in pool.run("loss_jobs:linear_layer", world, **arguments):
        assert found["loss"] <= EXACT, found
        assert found["gradient"] <= EXACT, found
        assert found["mean of means"] > 1e-3, "these counts would not show the fault"


@pytest.mark.parametrize("micro", [1, 2])
def test_a18_one_and_seven_valid_targets(pool, micro):
    check(pool, 2, valid=ONE_AND_SEVEN, micro=micro)


def test_a18_one_token_on_rank_0_and_seven_on_rank_1(pool):
    check(pool, 2, valid=["11111111"], split=("lengths", (1, 7)))


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("split", ["contiguous", "head_tail"])
def test_a18_two_by_two_ranks(pool, split, micro):
    check(pool, 4, valid=[*ONE_AND_SEVEN, "11111111", "00000010"], split=(split,), dp=2, micro=micro)


def test_a18_four_ranks_of_one_sequence(pool):
    check(pool, 4, valid=["01000011"])


@pytest.mark.parametrize("averaged_by", [1, 2])
def test_a18_micro_batches_by_hand(pool, averaged_by):
    """4 on rank 0 and 1, seven times, on rank 1: the mean is 11/8 and not 2.5, however the step is cut."""
    for cut in ([[[4.0], []], [[1.0] * 3, [1.0] * 4]], [[[], [4.0]], [[1.0] * 7, []]]):
        found = pool.run("loss_jobs:step_of_micro_batches", 2, losses=cut, averaged_by=averaged_by)
        for (shown, grads), own in zip(found, cut, strict=True):
            assert sum(shown) == 1.375
            assert shown[0] == sum(map(sum, (cut[0][0], cut[1][0]))) / 8
            assert grads == [[averaged_by / 8] * len(part) for part in own]


def test_wrong_steps_are_refused_on_every_rank(pool):
    for rank, said in enumerate(pool.run("loss_jobs:refusals", 2)):
        assert "step_valid is 1, but this call alone has 2 valid tokens" in said["fewer"]
        assert "averaged_by 3" in said["averaged_by"]
        assert "averaged_by 1" in said["averaged_by"]
        assert "step_valid given" in said["only here"]
        assert "step_valid is 2.0; give" in said["float"]
        assert "step_valid is torch.float32 []; give" in said["float tensor"]
        assert "step_valid is torch.int64 [2]; give" in said["many"]
        assert all(("rank 0" in text) == (rank == 1) for name, text in said.items() if name.startswith(("f", "m")))


def test_a_mean_that_fits_where_the_sum_does_not():
    """fp16 ends at 65504."""
    import torch

    import ringspan as rs

    losses = torch.full((20000,), 8.0, dtype=torch.float16).requires_grad_()
    loss, shown = rs.masked_mean_loss(losses, torch.ones(20000, dtype=torch.bool))
    loss.backward()
    assert float(loss.detach()) == float(shown) == 8.0
    assert loss.dtype == shown.dtype == torch.float16
    assert float(losses.grad[0]) == pytest.approx(1 / 20000, rel=1e-2)
