"""The time of a decoding step of the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.serve import Engine, SamplingParams


def decoding_step(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Mean seconds of a step in which every one of these prompts gets a token; their prefill is not counted."""
    for prompt in prompts:
        engine.add_request(list(prompt), params)
    prefilled = engine.stats().computed_tokens + sum(map(len, prompts))
    while engine.stats().computed_tokens < prefilled:
        engine.step()
    start, steps = time.perf_counter(), 0
    while engine.has_work():
        engine.step()
        steps += 1
    return (time.perf_counter() - start) / steps
