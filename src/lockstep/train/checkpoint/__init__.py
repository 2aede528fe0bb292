"""Checkpoints: a directory per step that is either whole or refused. Format, saving, finding, loading."""

from lockstep.train.checkpoint.layout import RUN_CONFIG, checkpoints, newest_whole, step_of, step_path
from lockstep.train.checkpoint.load import Checkpoint, check_shapes, load_checkpoint
from lockstep.train.checkpoint.manifest import FORMAT, Manifest, verify
from lockstep.train.checkpoint.retention import prune, set_aside_after
from lockstep.train.checkpoint.save import remove_unfinished, save_checkpoint

__all__ = [
    "FORMAT",
    "RUN_CONFIG",
    "Checkpoint",
    "Manifest",
    "check_shapes",
    "checkpoints",
    "load_checkpoint",
    "newest_whole",
    "prune",
    "remove_unfinished",
    "save_checkpoint",
    "set_aside_after",
    "step_of",
    "step_path",
    "verify",
]
