"""What leaves a public function as an exception is told to the peers, once, and only where somebody listens."""

import inspect
import re

import pytest
import torch

import ringspan as rs
from ringspan import entry, flex

Q = torch.randn(1, 2, 4, 8)
PEERS = object()  # stands for a group of several ranks


class Odd(BaseException):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.fixture
def told(monkeypatch):
    """What `_refuse` gets: (name, text, is_unsupported, calls)."""
    found = []
    monkeypatch.setattr(entry, "_peers_of", lambda group: entry._Peers("g", 7) if group is PEERS else None)
    refuse = lambda *arguments: found.append(arguments)  # noqa: E731
    monkeypatch.setattr(entry.torch.ops.ringspan, "_refuse", refuse)
    return found


def valid(count=3):
    return torch.ones(count, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: rs.attention(Q, Q, Q, grup=1, group=PEERS), TypeError, "TypeError: .*'grup'"),
        (lambda: rs.attention(Q, Q, group=PEERS), TypeError, "TypeError: .*'value'"),
        (lambda: rs.attention(Q, Q, Q, scale="x", group=PEERS), ValueError, "scale is 'x'"),
        (lambda: rs.attention(Q, Q, Q, scale=10**400, group=PEERS), ValueError, "a number of 1329 bits"),
        (lambda: rs.attention(Q, Q, Q, assume_agreed="yes", group=PEERS), ValueError, "assume_agreed is 'yes'"),
        (lambda: flex.flex_attention(Q, Q, Q, no=1, group=PEERS), TypeError, "TypeError: .*'no'"),
        (lambda: flex.flex_attention(Q, Q, Q, return_lse=1, return_aux=1, group=PEERS), ValueError, "return_lse"),
        (lambda: rs.masked_mean_loss(torch.ones(3), valid(2), group=PEERS), ValueError, "valid has shape|group is"),
        (lambda: rs.masked_mean_loss(torch.ones(3), group=PEERS), TypeError, "TypeError: .*'valid'"),
        (lambda: rs.ShardMap.striped(8, 2).unshard(Q, group=PEERS), TypeError, "TypeError: .*'dim'"),
    ],
)
def test_any_exception_is_told_once(told, call, kind, text):
    with pytest.raises(kind):
        call()
    [(name, message, is_unsupported, calls)] = told
    assert (name, is_unsupported, calls) == ("g", False, 7)
    assert re.search(text, message), message


@pytest.mark.parametrize(
    ("error", "text", "is_unsupported"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt: without a message", False),
        (SystemExit(3), "SystemExit: 3", False),
        (MemoryError("no room"), "MemoryError: no room", False),
        (NotImplementedError("not on a star"), "not on a star", True),
        (ValueError("scale is nan"), "scale is nan", False),
        (ValueError(), "ValueError: without a message", False),
        (Odd(), "Odd: without a message", False),
    ],
)
def test_how_an_exception_is_told(told, error, text, is_unsupported):
    @entry.enters()
    def fail(*, group=None):
        raise error

    with pytest.raises(type(error)):
        fail(group=PEERS)
    assert told == [("g", text, is_unsupported, 7)]


def test_nobody_is_told_where_nobody_listens(told):
    for group in (None, rs.LOCAL):
        with pytest.raises(ValueError, match="scale"):
            rs.attention(Q, Q, Q, scale="x", group=group)
    with pytest.raises(ValueError, match="scale"):
        rs.attention(Q, Q, Q, scale="x", group=PEERS, assume_agreed=True)
    assert told == []


def test_a_telling_that_fails_hides_nothing(told, monkeypatch):
    def gone(*arguments):
        raise RuntimeError("the group is gone")

    monkeypatch.setattr(entry.torch.ops.ringspan, "_refuse", gone)
    with pytest.raises(ValueError, match="scale is 'x'"):
        rs.attention(Q, Q, Q, scale="x", group=PEERS)


def test_a_mark_is_taken_once(told):
    error = ValueError("told inside")
    for _ in range(2):  # a program may raise one object twice
        with pytest.raises(ValueError, match="told inside"), entry.Telling(PEERS):
            raise error
        assert entry.take_mark(error)
        assert not entry.take_mark(error)
    assert len(told) == 2


def test_public_functions_keep_their_signatures():
    for function, first in ((rs.attention, "query"), (flex.flex_attention, "query"), (rs.ShardMap.unshard, "self")):
        assert next(iter(inspect.signature(function).parameters)) == first
        assert function.__doc__
    assert inspect.signature(rs.attention).parameters["softcap"].default is None


@pytest.mark.parametrize("group", [None, rs.LOCAL])
def test_compiled_calls_pass_through(group):
    def call(q):
        return rs.attention(q, q, q, mask=rs.causal(), group=group)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(Q), call(Q))
