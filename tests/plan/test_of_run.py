"""Plans for a training run: of its model and batch, and only what `lockstep train` takes with all else it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config import load_config
from lockstep.errors import LockstepError
from lockstep.parallel.rules import check_run
from lockstep.plan import Batch, model_shape, search_to_run
from lockstep.plan.of_run import asked_of, batch_of, dtype_of
from lockstep.plan.to_run import Found
from lockstep.train.planned import planned

DENSE = "{vocab_size: 512, hidden_size: 512, intermediate_size: 768, num_layers: 4, num_heads: 4, num_kv_heads: 2"
EXPERTS = f"{DENSE}, num_experts: 4, experts_per_token: 2, family: mixtral"
TRAIN = "train: {micro_batch: 2, micro_batches: 8}\ndata: {seq_len: 256}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def search(file: Path, cluster: str = "4xA100-80", **pins: Any) -> Found:
    shape, run = asked_of(str(file))
    batch = batch_of(run)
    return search_to_run(shape, cluster, seq=batch.seq, global_batch_tokens=batch.tokens, pins=pins, run=run)


def taken(file: Path, found: Found) -> None:
    """Every plan is one that the trainer's checks let pass."""
    for plan in found.plans:
        plan.save(file.with_name("plan.yaml"))
        check_run(planned(load_config(file), file.with_name("plan.yaml")))


def test_a_run_without_a_model_is_of_the_default_one(file: Path) -> None:
    file.write_text(TRAIN)
    shape, run = asked_of(str(file))
    assert (shape.layers, shape.vocab) == (6, 4096)
    assert (batch_of(run), dtype_of(run)) == (Batch(16, 256), "bf16")
    assert model_shape(file) == shape


def test_a_model_by_name_has_the_planners_batch() -> None:
    assert asked_of("llama3-8b") == (model_shape("llama3-8b"), None)
    assert (batch_of(None), dtype_of(None)) == (Batch(512, 8192), "bf16")


def test_products_are_counted_in_the_runs_dtype(file: Path) -> None:
    file.write_text(f"{TRAIN}".replace("train: {", "train: {dtype: float32, "))
    assert dtype_of(asked_of(str(file))[1]) == "fp32"


def test_a_mistake_in_the_run_is_told(file: Path) -> None:
    file.write_text("trian: {micro_batch: 2}\ntrain: {}\n")
    with pytest.raises(LockstepError, match="unknown key `trian`: did you mean `train`"):
        asked_of(str(file))


def test_adapters_train_with_replicas_only(file: Path) -> None:
    file.write_text(f"model: {DENSE}}}\n{TRAIN}lora: {{rank: 4}}\n")
    found = search(file)
    assert all(plan.layout.pp * plan.layout.tp == 1 for plan in found.plans)
    assert found.plans[0].worse == ""
    assert all("% slower" in plan.worse for plan in found.plans[1:])
    taken(file, found)
    pinned = search(file, tp=2)
    assert "`lockstep train` refuses it: lora.rank 4 with parallel" in pinned.note


def test_the_load_balance_loss_is_of_one_process(file: Path) -> None:
    file.write_text(f"model: {EXPERTS}, router_aux_loss: 0.01}}\n{TRAIN}")
    assert "refuses it: router_aux_loss is 0.01" in search(file, "2xA100-80").note
    alone = search(file, "1xA100-80")
    assert alone.note == ""
    taken(file, alone)
    file.write_text(f"model: {EXPERTS}, router_aux_loss: 0.0}}\n{TRAIN}")
    assert search(file, "2xA100-80").note == ""
