"""Training: data -> loop over global batches -> checkpoints, bit for bit the same however often it was stopped."""

from lockstep.train.data import Dataset
from lockstep.train.evaluate import Evaluation
from lockstep.train.optimizer import AdamW
from lockstep.train.schedule import lr_factor
from lockstep.train.trainer import Result, Trainer

__all__ = ["AdamW", "Dataset", "Evaluation", "Result", "Trainer", "lr_factor"]
