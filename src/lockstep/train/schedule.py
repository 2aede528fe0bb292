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
    warmup, decay = lengths(schedule, steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "cosine":
        span = max(steps - 1 - warmup, 1)
        progress = min((step - warmup) / span, 1.0)
        return schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.kind == "wsd" and step >= steps - decay:
        progress = min((step - (steps - decay) + 1) / decay, 1.0)
        return 1.0 - (1.0 - schedule.final) * progress
    return 1.0


def lengths(schedule: ScheduleConfig, steps: int) -> tuple[int, int]:
    """Steps of the warm-up and of the final fall; those that are not given follow the length of the run."""
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    return min(steps // 10, 20) if warmup is None else warmup, min(steps // 6, 50) if decay is None else decay


def check_schedule(schedule: ScheduleConfig, steps: int) -> None:
    """Raise if warm-up and decay do not fit into the run."""
    warmup, decay = lengths(schedule, steps)
    needed = warmup + (decay if schedule.kind == "wsd" else 0)
    if needed > steps:
        raise LockstepError(
            f"the schedule needs {needed} steps (schedule.warmup_steps {warmup}"
            + (f" + schedule.decay_steps {decay}" if schedule.kind == "wsd" else "")
            + f") but train.steps is {steps}: lower them or train for more steps"
        )
