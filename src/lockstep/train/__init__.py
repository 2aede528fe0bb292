"""Training: data -> loop over global batches -> checkpoints, bit for bit the same however often it was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import importer

if TYPE_CHECKING:
    from lockstep.train.data import Dataset as Dataset
    from lockstep.train.evaluate import Evaluation as Evaluation
    from lockstep.train.optimizer import AdamW as AdamW
    from lockstep.train.schedule import lr_factor as lr_factor
    from lockstep.train.trainer import Result as Result
    from lockstep.train.trainer import Trainer as Trainer

_FILES = {
    "AdamW": "optimizer", "Dataset": "data", "Evaluation": "evaluate", "Result": "trainer", "Trainer": "trainer",
    "lr_factor": "schedule",
}  # fmt: skip
"""Where each public name lives. It is imported when asked for: a plan is checked without torch."""

__all__ = ["AdamW", "Dataset", "Evaluation", "Result", "Trainer", "lr_factor"]

__getattr__ = importer(__name__, _FILES)
