"""Jobs of the pool: every front is entered on all ranks, and on one of them something is raised on the way."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import fronts
import torch
import torch.distributed as dist
from fronts import Front, Setting
from trials import Arena, Told, faults_of_group

import ringspan as rs

WORDS = "what the test itself says"
LONG = 20 << 20


class Unforeseen(BaseException):
    """What no library knows."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError(WORDS),
    "TypeError": lambda: TypeError(WORDS),
    "RuntimeError": lambda: RuntimeError(WORDS),
    "NotImplementedError": lambda: NotImplementedError(WORDS),
    "MemoryError": lambda: MemoryError(WORDS),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(WORDS),
    "Unforeseen": lambda: Unforeseen(WORDS),
    "long": lambda: ValueError(WORDS + " " + "x" * LONG),
}


class Raising(rs.Mask):
    """A mask that cannot be encoded."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode(self, frame: Any, tables: list) -> list[int]:
        raise self.error


class BadTable(rs.Mask):
    """A prefix whose table the op refuses."""

    def encode(self, frame: Any, tables: list) -> list[int]:
        tables.append(torch.zeros(1))
        return [4, len(tables) - 1, 1]


@contextlib.contextmanager
def replaced(places: tuple[str, ...], error: BaseException) -> Iterator[None]:
    """The first of "module:attribute" or "module:Class.name" that exists raises `error` in here."""
    for place in places:
        module, path = place.split(":")
        *owners, name = path.split(".")
        owner = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part, None)
        if hasattr(owner, name):
            break
    else:
        raise AssertionError(f"none of {places} exists")

    def stand_in(*_: Any, **__: Any) -> None:
        raise error

    kept = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextlib.contextmanager
def step_refusal(error: BaseException) -> Iterator[None]:
    """`_step_refusal`, which the op asks before the agreement, has a kernel for the CPU that raises."""

    def kernel(query: torch.Tensor, sizes: list[int], given: list[str]) -> str:
        raise error

    library = torch.library.Library("ringspan", "IMPL")
    library.impl("_step_refusal", kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()


def stages_of(front: Front, setting: Setting) -> dict[str, tuple[Callable[[BaseException], Any], list[str]]]:
    """Where something can be raised: a call of the odd rank alone, and with which of ERRORS. "own": the call's own."""

    def inside(context: Callable[[BaseException], Any], error: BaseException) -> Any:
        with context(error):
            return front.call(setting)

    found: dict[str, tuple[Callable[[BaseException], Any], list[str]]] = {}
    for name, changes in front.mistakes.items():
        found[name] = (functools.partial(lambda changes, _: front.call(setting, **changes(setting)), changes), ["own"])
    if front.checks:
        found["checks"] = (functools.partial(inside, functools.partial(replaced, front.checks)), [*ERRORS])
    if front.encoding:
        found["encoding"] = (functools.partial(inside, functools.partial(replaced, front.encoding)), [*ERRORS])
    if front.takes_mask:
        found["encode of a mask"] = (lambda error: front.call(setting, mask=Raising(error)), [*ERRORS])
        found["a bad table"] = (lambda _: front.call(setting, mask=BadTable()), ["own"])
    if front.asks_steps:
        found["op"] = (functools.partial(inside, step_refusal), [*ERRORS])
    return found


def told_everywhere(
    group: dist.ProcessGroup, fresh: list[dist.ProcessGroup], name: str, at_most: int = 2
) -> list[tuple[str, str, int, Told]]:
    """(stage, error, odd rank, what this rank saw) of every stage and error; a stage ends at its second fault."""
    arena = Arena(group, fresh)
    front = fronts.FRONTS[name]()
    setting = front.prepare(arena)
    assert front.error(arena, setting) == 0, "the front's call is wrong before anything is raised"
    found = []
    stages = stages_of(front, setting)
    stages |= {"backward": (lambda error: None, [*ERRORS])} if front.has_backward and front.asks_steps else {}
    for stage, (attempt, errors) in stages.items():
        faults = 0
        for count, error in enumerate(errors):
            odd = (count + len(found)) % arena.world
            if stage == "backward":
                told = backward_trial(arena, front, setting, odd, ERRORS[error]())
            else:
                raised = ERRORS.get(error, lambda: None)()
                call = (
                    functools.partial(attempt, raised) if arena.rank == odd else functools.partial(front.call, setting)
                )
                told = arena.trial(call)
            found.append((stage, error, odd, told))
            if arena.is_used_up:
                return found
            if arena.name != setting.group_name:
                setting = front.prepare(arena)
                attempt = stages_of(front, setting).get(stage, (attempt, []))[0]
            told.value = front.error(arena, setting)
            faults += any(arena.share(bool(faults_of_group([told]))))
            if faults >= at_most:
                break
    return found


def backward_trial(arena: Arena, front: Front, setting: Setting, odd: int, error: BaseException) -> Told:
    """The forward is good, in the backward of the odd rank the op raises."""
    out = front.call(setting)

    def call() -> None:
        with step_refusal(error) if arena.rank == odd else contextlib.nullcontext():
            out.sum().backward()

    return arena.trial(call)
