"""What all tests share: one thread per worker when several run, and repeatable property tests."""

from __future__ import annotations

import os

# Before torch is imported, and for child processes too: two workers with two threads each would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

import lockstep  # noqa: F401 - before any test imports torch, as in a user's program: it sets how threads wait

# No deadline: a busy machine is no failure. Derandomised: a red run is red again.
settings.register_profile("lockstep", deadline=None, derandomize=True, database=None)
settings.load_profile("lockstep")
