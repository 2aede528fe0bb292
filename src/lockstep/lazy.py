"""Names of a package that are imported when asked for (PEP 562): who needs few of them does not wait for the rest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def importer(package: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`. files: where below the package each public name lives."""

    def get(name: str) -> Any:
        if name not in files:
            there = ", ".join(sys.modules[package].__all__)
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {there}")
        return getattr(importlib.import_module(f"{package}.{files[name]}"), name)

    return get
