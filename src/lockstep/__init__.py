"""Lockstep: train and serve large language models with the same bits on every path."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lockstep.lazy import importer

# Before torch brings OpenMP in, whose threads run torch's own operators (ours have a team: ops/csrc/team.h). They would
# wait for work by spinning, which on a machine that does anything else as well holds the very cores that the work
# needs: 20 times fewer tokens a second were measured with two other processes on two cores. A policy set by the user
# stays.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from lockstep.config.schema import Config as Config
    from lockstep.model import Model as Model
    from lockstep.model import load as load
    from lockstep.serve import Completion as Completion
    from lockstep.serve import Engine as Engine
    from lockstep.serve import SamplingParams as SamplingParams
    from lockstep.train import Trainer as Trainer

_ROOMS = {
    "Config": "config",
    "load": "model",
    "Model": "model",
    "Trainer": "train",
    "Engine": "serve",
    "SamplingParams": "serve",
    "Completion": "serve",
}
"""Where each public name lives. It is imported when asked for: `lockstep --help` must not wait for torch."""

__all__ = ["Completion", "Config", "Engine", "Model", "SamplingParams", "Trainer", "load"]

__getattr__ = importer(__name__, _ROOMS)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
