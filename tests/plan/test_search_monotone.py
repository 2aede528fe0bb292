"""What must hold of any search: it gives the same answer again, more of anything never hurts, a pin never helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.plan import Batch, Cluster, Coefficients, Layout, Plan, load_cluster, search
from lockstep.plan import evaluate as evaluate_module
from lockstep.plan.evaluate import FINALISTS, evaluate
from lockstep.plan.named_shape import model_shape

MODEL = {"layers": 12, "hidden": 1024, "heads": 16, "kv_heads": 4, "intermediate": 2816, "vocab": 32000, "gated": True}
ASKED = {"seq": 2048, "global_batch_tokens": 1 << 16}
PLACE = load_cluster("8xA100-80")


def best(cluster: Cluster, **pins: Any) -> Plan:
    return search(MODEL, cluster, pins=pins, top=1, **ASKED)[0]


def of_memory(gigabytes: float) -> Cluster:
    return replace(PLACE, device=replace(PLACE.device, memory_gb=gigabytes))


def with_device(**changes: float) -> Cluster:
    return replace(PLACE, device=replace(PLACE.device, **changes))


def test_the_same_answer_every_time() -> None:
    again = [search(MODEL, of_memory(6), top=10, **ASKED) for _ in range(2)]
    assert again[0] == again[1]


def test_candidates_that_are_left_out_are_none_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all made to fit, and not only those that may be among the best, the finalists are the same."""

    def finalists() -> list[tuple[Layout, float, float]]:
        found = evaluate(model_shape(MODEL), of_memory(8), Batch(32, 2048), {}, Coefficients())
        seconds = np.where(found.memory <= of_memory(8).device.capacity, found.seconds, np.inf)
        order = np.argsort(seconds, kind="stable")[:FINALISTS]
        return [(found.layout(int(i)), float(found.seconds[i]), float(found.memory[i])) for i in order]

    monkeypatch.setattr(evaluate_module, "_AT_ONCE", 128)
    some = finalists()
    monkeypatch.setattr(evaluate_module, "FINALISTS", 10**5)
    assert finalists() == some
    assert any(layout.recompute_layers for layout, *_ in some)


def test_more_memory_is_never_slower() -> None:
    steps = [best(of_memory(gigabytes)).prediction.step_s for gigabytes in (4.5, 6, 12, 80)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


@pytest.mark.parametrize("level", ["node", "network"])
def test_more_bandwidth_is_never_slower(level: str) -> None:
    place = replace(PLACE, levels=(replace(PLACE.levels[0], size=4), PLACE.levels[1]))
    steps = [best(place.with_level(level, gb_s=rate)).prediction.step_s for rate in (1, 16, 256)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


@pytest.mark.parametrize(
    ("name", "values"),
    [("memory_gb_s", (100, 500, 2000)), ("matrix_efficiency", (0.1, 0.5, 0.9)), ("host_gb_s", (1, 9, 99))],
)
def test_a_better_device_is_never_slower(name: str, values: tuple[float, ...]) -> None:
    steps = [best(with_device(**{name: value})).prediction.step_s for value in values]
    assert steps == sorted(steps, reverse=True)


PINS = {
    "pp": (1, 2, 4), "dp": (1, 2, 8), "cp": (1, 2), "tp": (1, 2, 4), "fsdp": (0, 1, 2, 3), "micro_batch": (1, 2, 4),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"), "chunks": (1, 2, 3), "recompute": ("none", "full"),
    "recompute_layers": (0, 1), "offload_layers": (0, 1), "sequence_parallel": (0, 1), "bucket_mb": (1, 7, 400),
    "ep": (1,), "layers_per_stage": ((12,), (2, 4, 4, 2)), "recompute_per_stage": ((1, 0, 0, 0),),
    "offload_per_stage": ((2, 0),),
}  # fmt: skip


@pytest.fixture(scope="module")
def free() -> Plan:
    return best(PLACE)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in PINS.items() for value in values])
def test_a_pin_is_kept_and_never_helps(free: Plan, key: str, value: Any) -> None:
    plans = search(MODEL, PLACE, pins={key: value}, top=10, **ASKED)
    for plan in plans:
        by_stage = {"recompute_layers": plan.layout.recomputed, "offload_layers": plan.layout.offloaded}
        assert set(by_stage[key]) == {value} if key in by_stage else getattr(plan.layout, key) == value
    assert plans[0].prediction.step_s >= free.prediction.step_s * (1 - 1e-12)


def test_two_pins_together_are_kept_and_no_faster_than_each() -> None:
    pins = {"layers_per_stage": "3,4,3,2", "recompute_per_stage": "2,1,0,0", "schedule": "1f1b"}
    plans = search(MODEL, of_memory(12), pins=pins, **ASKED)
    for plan in plans:
        layout = plan.layout
        assert (layout.pp, layout.layers_per_stage, layout.recomputed) == (4, (3, 4, 3, 2), (2, 1, 0, 0))
        assert plan.prediction.fits
    assert plans[0].prediction.step_s >= best(of_memory(12), schedule="1f1b", pp=4).prediction.step_s


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"layers_per_stage": "6,5"}, "these are 11 layers, and custom has 12"),
        ({"layers_per_stage": "12,0"}, "expected 1 to 12"),
        ({"layers_per_stage": ""}, "layers_per_stage=: expected a whole number"),
        ({"layers_per_stage": 12}, "expected a number for each stage, such as layers_per_stage=9,8,8,7"),
        ({"layers_per_stage": "6,6", "pp": 4}, "has 2 numbers for 4 stages: give one for each stage"),
        ({"recompute_per_stage": "1,0", "offload_per_stage": "1,0,0,0"}, "has 4 numbers for 2 stages"),
        ({"recompute_per_stage": "1,0", "recompute_layers": 1}, "say the same twice"),
        ({"recompute_per_stage": "1,0", "recompute": "full"}, "leaves nothing for recompute_per_stage"),
        (
            {"layers_per_stage": "2,10", "recompute_per_stage": "3,0"},
            "recompute 3 and offload 0 layers of stage 0, which has 2",
        ),
        ({"layers_per_stage": "4,4,4"}, "pinned pp 3 does not divide the 8 devices"),
    ],
)
def test_lists_that_cannot_be(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(LockstepError, match=message):
        search(MODEL, PLACE, pins=pins, **ASKED)
