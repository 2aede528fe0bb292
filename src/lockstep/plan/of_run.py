"""What `lockstep plan MODEL` plans for: a model and, where its file is a training run's, that run's batch."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import Config
from lockstep.plan.layout import Batch
from lockstep.plan.named_shape import is_yaml, model_shape, read_model, run_of, shape_of_run
from lockstep.plan.shape import ModelShape


def asked_of(model: str) -> tuple[ModelShape, Config | None]:
    """The model, and the run where ``model`` is a run's YAML file; it is read once.

    Raises LockstepError for what is no model, a file that cannot be read, and a mistake in a run's.
    """
    path = Path(model)
    if not is_yaml(path):
        return model_shape(model), None
    content = read_model(path)
    run = run_of(content, path)
    return (model_shape(content), None) if run is None else (shape_of_run(run), run)


def dtype_of(run: Config | None) -> str:
    """Of the run's products, as descriptions of clusters name it; without a run, bf16."""
    return "fp32" if run is not None and run.train.dtype == "float32" else "bf16"


def batch_of(run: Config | None) -> Batch:
    """Of a step of the run; without one, 512 sequences of 8192 tokens."""
    if run is None:
        return Batch(512, 8192)
    return Batch(run.train.micro_batch * run.train.micro_batches, run.data.seq_len)
