"""PyTorch without what a process that traces nothing has no use for."""

from __future__ import annotations

import sys
from types import ModuleType

_META = "torch._meta_registrations"
"""What PyTorch's own operators give on meta tensors, written in Python, with the decompositions that they come from:
0.5 of the 1.8 seconds that `import torch` takes. Only what captures a graph needs it, and imports it then
(`compile/compiler.py`)."""


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
