"""Public functions of `lockstep.plan` answer a wrong type, NaN, zero or a negative number with a LockstepError."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep import plan
from lockstep.errors import LockstepError
from lockstep.plan import Batch, Coefficients, Layout, Measured, StageTimes, model_shape, schedule, simulate
from lockstep.plan.balance_problem import BalanceProblem, End, Keep, Layers

WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 2.5, float("nan"), float("inf"), 10**30, "x", "", b"8", (), [1, "a"], {},
    {"a": 1}, object(), [[1, 2], [3]],
)  # fmt: skip
SHAPE = plan.ModelShape("tiny", 4, 64, 4, 128, gated=True)
TIMES = StageTimes(1.0, 1.0, 1.0)
TABLE = schedule("1f1b", 2, 4)
RUN = simulate(TABLE, TIMES)
ASKED = {"seq": 64, "global_batch_tokens": 512}
GOLDEN = Path(__file__).parents[1] / "oracles" / "balance_golden.json"
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "schedule": (schedule, {"name": "zb-1p", "stages": 2, "micro_batches": 4, "times": TIMES, "comm": 0.0,
                            "chunks": 1, "activation_cap": 2.0, "m_w": 0.5}),
    "simulate": (simulate, {"table": TABLE, "times": TIMES, "comm": 0.0, "m_b": 1.0, "m_w": 0.5}),
    "search_schedule": (plan.search_schedule, {"stages": 2, "micro_batches": 2, "times": TIMES, "comm": 0.0,
                                               "activation_cap": 2.0, "m_w": 1.0, "chunks": 1, "metric": "max_span",
                                               "seconds": 0.0}),
    "activation_bytes": (plan.activation_bytes, {"hidden": 64, "heads": 4, "seq": 32, "micro_batch": 1, "layers": 2,
                                                 "tp": 1, "pp": 1, "chunks": 1, "sequence_parallel": False,
                                                 "recompute": "none"}),
    "predict": (plan.predict, {"model": SHAPE, "layout": Layout(dp=8), "cluster": "8xH100", "batch": Batch(8, 64),
                               "coefficients": Coefficients(), "dtype": "bf16"}),
    "rank_memory": (plan.rank_memory, {"model": SHAPE, "layout": Layout(dp=8), "batch": Batch(8, 64), "rank": 3}),
    "search": (plan.search, {"model": SHAPE, "cluster": "2xH100", **ASKED, "pins": {"dp": 2}, "top": 2,
                             "coefficients": Coefficients(), "dtype": "bf16"}),
    "calibrate": (plan.calibrate, {"rows": [Measured(SHAPE, Layout(), Batch(8, 64), 1.0)], "cluster": "1xH100"}),
    "model_shape": (model_shape, {"given": "llama3-8b"}),
    "load_cluster": (plan.load_cluster, {"given": "8xH100"}),
    "balance": (plan.balance, {"problem": json.loads(GOLDEN.read_text())}),
    "timeline_html": (plan.timeline_html, {"simulation": RUN, "title": "t", "unit": "s", "memory_unit": "GB",
                                            "held": "memory", "facts": {"a": "b"}}),
    "timeline_text": (plan.timeline_text, {"simulation": RUN, "columns": 20}),
    "trace": (plan.trace, {"simulation": RUN, "seconds_per_unit": 1.0, "held": "memory"}),
}  # fmt: skip


def tolerates(call: Callable[[], object]) -> None:
    """A result or a LockstepError; anything else is what a user calls a crash."""
    with suppress(LockstepError):
        call()


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_makes_a_crash(name: str) -> None:
    function, valid = CALLS[name]
    function(**valid)
    for key in valid:
        for value in WRONG:
            tolerates(partial(function, **{**valid, key: value}))


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        (Layout(pp=2, dp=4, tp=1), lambda it: plan.predict(SHAPE, it, "8xH100", Batch(8, 64))),
        (Batch(8, 64), lambda it: plan.predict(SHAPE, Layout(dp=8), "8xH100", it)),
        (Coefficients(), lambda it: plan.predict(SHAPE, Layout(dp=8), "8xH100", Batch(8, 64), it)),
        (TIMES, lambda it: simulate(TABLE, it)),
        (SHAPE, lambda it: plan.predict(it, Layout(dp=8), "8xH100", Batch(8, 64))),
        (
            BalanceProblem(2, 4, (Layers("l", 4, 1.0, (Keep("none", 1.0, 2.0, 1.0),)),), 100.0, End(), End()),
            plan.balance,
        ),
    ],
    ids=lambda it: type(it).__name__,
)
def test_no_field_of_a_value_makes_a_crash(kind: Any, use: Callable[[Any], object]) -> None:
    def changed(name: str, value: Any) -> object:
        return use(replace(kind, **{name: value}))

    use(kind)
    for name in (field.name for field in fields(kind)):
        for value in WRONG:
            tolerates(partial(changed, name, value))


def pinned(**pins: object) -> object:
    return plan.search("llama3-8b", "8xH100", **ASKED, pins=pins)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule("1f1b", 2.5, 8), r"1f1b: stages is 2\.5; give a whole number of at least 1"),  # type: ignore[arg-type]
        (lambda: schedule("1f1b", 8, float("nan")), "micro_batches is nan; give a whole number"),  # type: ignore[arg-type]
        (lambda: schedule("1f1b", 8, 10**12), "a schedule has at most 4,194,304. Give fewer, larger micro-batches"),
        (lambda: simulate(TABLE, StageTimes(float("nan"), 1, 1)), r"times\.f is nan; give a finite number"),
        (lambda: plan.predict("llama3-8b", Layout(dp=8.0), "8xH100", Batch(8, 64)), r"layout: dp is 8\.0; give"),  # type: ignore[arg-type]
        (lambda: plan.predict(SHAPE, Layout(recompute_layers=3, offload_layers=2), "1xH100", Batch(8, 64)),
         "recompute_layers 3 and offload_layers 2 are of 5 layers, and tiny has 4"),
        (lambda: pinned(tp="²"), "pin tp=²: expected a whole number"),
        (lambda: plan.search("llama3-8b", "8xH100", **ASKED, pins=[]), r"pins is \[\]; give a Mapping"),  # type: ignore[arg-type]
        (lambda: plan.search("llama3-8b", "8xH100", **ASKED, pins=0), "pins is 0; give a Mapping"),  # type: ignore[arg-type]
        (lambda: plan.activation_bytes(64, 4, 32, 1, 2, sequence_parallel=[]), r"parallel is \[\]; give a bool"),  # type: ignore[arg-type]
        (lambda: plan.calibrate([Measured(SHAPE, Layout(), Batch(8, 64), 10**30)]), "step_s, a measured time, is 1000"),
        (lambda: plan.predict(SHAPE, Layout(), "1xH100", Batch(8, 64), Coefficients(layer={(1, 2): 1.0})),
         r"layer is \[1, 2\]; give 11 numbers: hidden, heads"),
        (lambda: model_shape(" "), "model is empty: give a name"),
        (lambda: pinned(tp="9" * 5000), "expected 1 to 16777216"),
        (lambda: pinned(bucket_mb=10**400), "expected 1 to 16777216"),
        (lambda: pinned(dp=1 << 20, cp=1 << 20, tp=1 << 24), "does not divide the 8 devices"),
        (lambda: plan.search("llama3-8b", "8xH100", **ASKED, pins={1: 2}), "pin 1 is unknown"),  # type: ignore[dict-item]
        (lambda: plan.search("llama3-8b", "8xH100", seq=2.5, global_batch_tokens=4096), r"seq.* is 2\.5; give"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_the_lesson(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LockstepError, match=message):
        call()
