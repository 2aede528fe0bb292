"""What a training run's YAML file asks of its plan."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import load_config
from lockstep.plan.layout import Batch
from lockstep.plan.yaml_file import read_yaml


def batch_of_run(model: str) -> Batch | None:
    """The batch of a step of a run, where ``model`` is a run's YAML file; None for a model by name, config.json or
    sizes. Raises LockstepError for a file that cannot be read, and for a mistake in a run's."""
    path = Path(model)
    if path.suffix not in (".yaml", ".yml"):
        return None
    content = read_yaml(path, "model file")
    if not isinstance(content, dict) or "model" not in content:
        return None
    config = load_config(path)
    return Batch(config.train.micro_batch * config.train.micro_batches, config.data.seq_len)
