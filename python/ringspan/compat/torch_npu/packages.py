"""Modules that no file stands behind."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def packages_of(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """A package for each full name, with these attributes; they count as packages, so that others can be imported from
    below them.
    """
    packages = {}
    for name, content in contents.items():
        packages[name] = ModuleType(name)
        packages[name].__path__ = []
        vars(packages[name]).update(content)
    return packages
