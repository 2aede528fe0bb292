"""The imports of a command that computes, without the garbage collector looking through them again and again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """PyTorch makes a quarter of a million objects that stay. Collections while they are made find nothing and take
    0.4 s of a start's processor time; taken out of the collector's sight afterwards (`gc.freeze`) they cost the running
    program nothing either. Does nothing where PyTorch is imported already: what is there is not this command's.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
