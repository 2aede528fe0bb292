"""The learning rate over the steps, as a closed formula: nothing to store, nothing to resume."""

from __future__ import annotations

import math

from lockstep.config.train import ScheduleConfig
from lockstep.errors import LockstepError


def lr_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The factor on the peak learning rate for update ``step`` (0-based) of ``steps``.

    Warm-up: ``(step + 1) / warmup_steps``. Cosine (Loshchilov and Hutter, 2017): from 1 after the warm-up to
    ``final`` at the last step. WSD (Hu et al., 2024): 1, then linear to ``final`` over the last
    ``decay_steps``.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "cosine":
        span = max(steps - 1 - schedule.warmup_steps, 1)
        progress = min((step - schedule.warmup_steps) / span, 1.0)
        return schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.kind == "wsd" and step >= steps - schedule.decay_steps:
        progress = min((step - (steps - schedule.decay_steps) + 1) / schedule.decay_steps, 1.0)
        return 1.0 - (1.0 - schedule.final) * progress
    return 1.0


def check_schedule(schedule: ScheduleConfig, steps: int) -> None:
    """Raise if warm-up and decay do not fit into the run."""
    needed = schedule.warmup_steps + (schedule.decay_steps if schedule.kind == "wsd" else 0)
    if needed > steps:
        raise LockstepError(
            f"the schedule needs {needed} steps (schedule.warmup_steps {schedule.warmup_steps}"
            + (f" + schedule.decay_steps {schedule.decay_steps}" if schedule.kind == "wsd" else "")
            + f") but train.steps is {steps}: lower them or train for more steps"
        )
