"""Changes to other people's modules, and the way back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

_ABSENT = object()


def set_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets `owner.name`; closing `stack` puts back what was there, or nothing where nothing was."""
    before = vars(owner).get(name, _ABSENT)
    undo = (delattr, owner, name) if before is _ABSENT else (setattr, owner, name, before)
    setattr(owner, name, value)
    stack.callback(*undo)


def set_item(stack: ExitStack, mapping: dict, key: Any, value: Any) -> None:
    """The same for `mapping[key]`."""
    before = mapping.get(key, _ABSENT)
    undo = (mapping.pop, key, None) if before is _ABSENT else (mapping.__setitem__, key, before)
    mapping[key] = value
    stack.callback(*undo)
