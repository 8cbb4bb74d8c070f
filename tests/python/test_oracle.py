"""The judge is judged: finite differences, closed forms and masks counted by hand."""

import numpy as np
import oracle


def test_gradients_equal_central_differences():
    q, k, v, dout = oracle.draw(0, 6, 4, 2, 8)
    dlse = np.random.default_rng(1).standard_normal((1, 4, 6))
    keep = oracle.keep_of(("causal",), 6, 6)

    def objective():
        result = oracle.attend(q, k, v, keep)
        return (result.out * dout).sum() + (result.lse * dlse).sum()

    result = oracle.attend(q, k, v, keep, dout, dlse)
    for tensor, grad, place in (
        (q, result.dq, (0, 1, 3, 2)),
        (k, result.dk, (0, 1, 2, 5)),
        (v, result.dv, (0, 0, 1, 3)),
    ):
        kept, step = tensor[place], 1e-6
        tensor[place] = kept + step
        above = objective()
        tensor[place] = kept - step
        below = objective()
        tensor[place] = kept
        assert abs((above - below) / (2 * step) - grad[place]) < 1e-8


def test_empty_rows_and_no_keys():
    q, k, v, dout = oracle.draw(1, 4, 2, 2, 8)
    result = oracle.attend(q, k, v, np.zeros((1, 4, 4), bool), dout)
    assert (result.out == 0).all()
    assert (result.lse == -np.inf).all()
    assert all((grad == 0).all() for grad in (result.dq, result.dk, result.dv))
    none = oracle.attend(q, k[:, :, :0], v[:, :, :0], np.zeros((1, 4, 0), bool), dout)
    assert (none.out == 0).all()


def test_masks_by_hand():
    assert oracle.keep_of(("causal",), 4, 8)[0].sum(1).tolist() == [1, 2, 3, 4]
    assert oracle.keep_of(("causal", "bottom_right"), 4, 8)[0].sum(1).tolist() == [5, 6, 7, 8]
    assert oracle.keep_of(("window", 1, 0), 4, 4)[0].sum(1).tolist() == [1, 2, 2, 2]
    assert oracle.keep_of(("chunked", 2), 5, 5)[0].sum(1).tolist() == [1, 2, 1, 2, 1]
    assert oracle.keep_of(("prefix", [3]), 4, 4)[0].sum(1).tolist() == [3, 3, 3, 4]
    assert oracle.keep_of(("ids", [1, 1, 0, 2, 2, 1]), 6, 6)[0].sum(1).tolist() == [1, 2, 0, 1, 2, 3]
    assert oracle.keep_of(("bands", [(1, 3, 0, 4, None, 0)]), 4, 4)[0].sum(1).tolist() == [0, 2, 3, 0]


def test_holdings_by_hand():
    assert [part.tolist() for part in oracle.holdings(("head_tail",), 7, 2)] == [[0, 5, 6], [1, 2, 3, 4]]
    assert [part.tolist() for part in oracle.holdings(("contiguous",), 5, 2)] == [[0, 1], [2, 3, 4]]
    assert [part.tolist() for part in oracle.holdings(("striped",), 5, 2)] == [[0, 2, 4], [1, 3]]
    assert [part.tolist() for part in oracle.holdings(("lengths", [2, 0, 1]), 3, 3)] == [[0, 1], [], [2]]


def test_error_sees_every_kind_of_difference():
    one = np.array([1.0, -np.inf])
    assert oracle.error(one, one) == 0
    assert oracle.error(np.array([1.5, -np.inf]), one) == 0.5
    assert oracle.error(np.array([np.nan, -np.inf]), one) == np.inf
    assert oracle.error(np.array([1.0, 0.0]), one) == np.inf
    assert oracle.error(np.array([1.0]), one) == np.inf
