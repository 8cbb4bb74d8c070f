"""The one way in: an exception that leaves a public function before its ranks have agreed is told to the peers.

    rank 0                                    rank 1
    attention(..., group=g)                   attention(..., group=g)
      enter: 4 calls of g so far                enter: 4 calls of g so far
      scale=nan -> ValueError                   the op publishes its call 5, and waits for the others'
      still 4 calls: refuses call 5  ------->   finds a refusal there -> ValueError "rank 0 refused call 5 ..."

Whatever the exception is (KeyboardInterrupt, an unknown keyword), the counters of calls stay alike. What an op has
told, or what comes after the agreement, has counted its call, and is not told again.

Nothing is told by traced code, under `assume_agreed=True` (nobody listens) and where there is no group to tell.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ringspan.group import Group, name_and_world

P = ParamSpec("P")
R = TypeVar("R")
# Tells whom the DTensors among a call's arguments belong to of an exception.
TellOnDTensors = Callable[[BaseException, Sequence[Any], Mapping[str, Any]], None]
_MARK = "_ringspan_told"


class _Peers(NamedTuple):
    """A group of several ranks, and how many of its calls this rank had taken part in."""

    name: str
    calls: int


def enters(tell_on_dtensors: TellOnDTensors | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function public: it has its group as the keyword `group`.

    tell_on_dtensors: for a function that takes DTensors and finds its group in them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def enter(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or kwargs.get("assume_agreed") is True:
                return function(*args, **kwargs)
            group: Any = kwargs.get("group")
            peers = None if group is None else _peers_of(group)
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if tell_on_dtensors is not None and has_dtensors(*args, *kwargs.values()):
                    tell_on_dtensors(error, args, kwargs)
                elif peers is not None and not _is_fake(args, kwargs):
                    _tell(error, peers)
                raise

        return enter

    return decorate


class Telling:
    """`with Telling(group):` tells the peers of what is raised inside, and marks it as told."""

    def __init__(self, group: Group) -> None:
        self._peers = _peers_of(group)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        if self._peers is not None:
            _tell(error, self._peers)
        with contextlib.suppress(Exception):
            object.__setattr__(error, _MARK, True)


def take_mark(error: BaseException) -> bool:
    """Whether it was told on its way here; asked once, by the outermost: a program may raise one object twice."""
    return error.__dict__.pop(_MARK, False)


def tell(error: BaseException, group: Group) -> None:
    """Refuses the next call of `group`. For an error that came before any."""
    peers = _peers_of(group)
    if peers is not None:
        _tell(error, peers)


def has_dtensors(*given: Any) -> bool:
    """Whether one of them is a DTensor."""
    # Plain tensors do not need to import DTensor (importing.py says why).
    subclasses = [one for one in given if isinstance(one, Tensor) and type(one) not in (Tensor, Parameter)]
    if not subclasses or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(one, DTensor) for one in subclasses)


def _peers_of(group: Group) -> _Peers | None:
    """None where there are none, where code is traced, and for what is no group: the function says so."""
    try:
        name, world = name_and_world(group)
    except ValueError:
        return None
    if not name or world == 1 or torch.compiler.is_compiling() or _is_fake():
        return None
    return _Peers(name, torch.ops.ringspan._calls(name))


def _is_fake(*given: Any) -> bool:
    """Whether the call runs without data: under FakeTensorMode, or on its tensors."""
    return torch._guards.detect_fake_mode(given or None) is not None


def _tell(error: BaseException, peers: _Peers) -> None:
    # The error on its way matters more than a group that is gone.
    with contextlib.suppress(Exception):
        is_unsupported = isinstance(error, NotImplementedError)
        torch.ops.ringspan._refuse(peers.name, _text_of(error), is_unsupported, peers.calls)


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    if text and isinstance(error, ValueError | NotImplementedError):
        return text
    return f"{type(error).__name__}: {text or 'without a message'}"
