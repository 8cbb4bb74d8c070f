"""Code that waits until a module is imported: PyTorch's DTensors take as long to import as half of PyTorch, and most
programs go without.

A finder, because nothing of PyTorch waits: torch.library registers a rule for a class that must exist, and an op that a
program calls on DTensors runs no Python of ours before DTensor has refused it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[], None]


def when_imported(name: str, action: Action) -> None:
    """Calls `action` right after module `name` was imported, whoever does that; now, if it was. Once."""
    if name in sys.modules:
        action()
        return
    if _WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, _WATCHER)
    _WATCHER.waiting.setdefault(name, []).append(action)


class _Watcher(MetaPathFinder):
    """Finds nothing by itself: it asks the other finders, and adds the actions to what they answer."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        answers = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((answer for answer in answers if answer is not None), None)
        if spec is not None and spec.loader is not None:
            self._add_actions(fullname, spec.loader)
        return spec

    def _add_actions(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            loader.exec_module = execute  # the loader is the module's own
            execute(module)
            for action in self.waiting.pop(name, []):
                action()

        loader.exec_module = execute_and_act


_WATCHER = _Watcher()
