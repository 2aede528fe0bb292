"""PyTorch sooner: loaded beside other imports, and without what a process that traces nothing has no use for."""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType

_META = "torch._meta_registrations"
"""What PyTorch's own operators give on meta tensors, written in Python, with the decompositions that they come from:
0.5 of the 1.8 seconds that `import torch` takes. Only what captures a graph needs it, and imports it then
(`compile/compiler.py`)."""
_LIBRARY = "libtorch_cpu.so"
"""Most of PyTorch. The system takes 0.3 s to load it."""


def preload() -> None:
    """Load that library on a thread, while this one imports what comes before PyTorch."""
    found = find_spec("torch")
    for place in () if found is None else found.submodule_search_locations or ():
        library = Path(place) / "lib" / _LIBRARY
        if library.exists():
            Thread(target=ctypes.CDLL, args=(str(library),), daemon=True).start()


def import_torch() -> None:
    """Import PyTorch without it; later imports of that module find it."""
    if "torch" in sys.modules:
        return
    sys.modules[_META] = ModuleType(_META)
    try:
        import torch
    finally:
        del sys.modules[_META]
    del torch._meta_registrations
