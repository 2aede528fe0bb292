"""Whatever the search proposes for a small model on a few processes, the trainer's check takes as it is."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.parallel.rules import check_run
from lockstep.plan import load_cluster, model_shape, search_to_run
from lockstep.plan.decoder_config import decoder_config
from lockstep.plan.to_run import not_run
from lockstep.train.planned import planned


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a small decoder: dense, with grouped heads, with experts, with latent attention."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if heads % n == 0]))
    sizes: dict[str, Any] = {
        "layers": draw(st.integers(1, 7)), "hidden": 16 * heads, "heads": heads, "kv_heads": kv_heads,
        "intermediate": draw(st.sampled_from([32, 48, 88])), "vocab": 64, "gated": True, "tied": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        experts = draw(st.sampled_from([2, 3, 4]))
        sizes |= {"experts": experts, "experts_per_token": draw(st.integers(1, experts)), "expert_intermediate": 32}
    if draw(st.integers(0, 3)) == 0:
        sizes |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        sizes["kv_heads"] = heads
    return sizes


asked = given(
    sizes=models(),
    processes=st.integers(1, 4),
    sequences=st.integers(1, 24),
    memory=st.sampled_from([80.0, 1.53]),  # GB, of which the runtime takes 1.5: enough, and hardly enough
    pins=st.dictionaries(st.sampled_from(["pp", "dp", "tp", "cp", "fsdp"]), st.integers(1, 2), max_size=1),
)
quiet = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(quiet, max_examples=3)
@asked
def test_the_trainer_takes_every_plan(**drawn: Any) -> None:
    takes(**drawn)


@pytest.mark.slow
@settings(quiet, max_examples=100)
@asked
def test_the_trainer_takes_every_plan_of_many_models(**drawn: Any) -> None:
    """`pytest -m slow tests/train/test_plans_are_run.py`: two minutes."""
    takes(**drawn)


def takes(sizes: dict[str, Any], processes: int, sequences: int, memory: float, pins: dict[str, int]) -> None:
    """The property, for one model, machine and batch."""
    shape, place = model_shape(sizes), load_cluster(f"{processes}xA100-80")
    device = vars(place.device) | {"memory_gb": memory}
    place = type(place)(**vars(place) | {"device": type(place.device)(**device)})
    try:
        found = search_to_run(shape, place, seq=16, global_batch_tokens=16 * sequences, pins=pins, top=20)
    except LockstepError:  # nothing factors, or fits
        return
    config = Config().model_copy(update={"model": decoder_config(shape, 16)})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.yaml"
        for plan in found.plans:
            if not_run(plan.layout, shape):
                assert "does not run" in found.note
                continue
            plan.save(file)
            check_run(planned(config, file))
