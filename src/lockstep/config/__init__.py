"""The configuration: typed sections, YAML in and out, errors that name the nearest valid key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import importer

if TYPE_CHECKING:
    from lockstep.config.compile import CompileConfig as CompileConfig
    from lockstep.config.load import load_config as load_config
    from lockstep.config.load import save_config as save_config
    from lockstep.config.model import ModelConfig as ModelConfig
    from lockstep.config.model import RopeScaling as RopeScaling
    from lockstep.config.schema import Config as Config
    from lockstep.config.section import Section as Section
    from lockstep.config.serve import ServeConfig as ServeConfig
    from lockstep.config.train import DataConfig as DataConfig
    from lockstep.config.train import LoraConfig as LoraConfig
    from lockstep.config.train import OptimizerConfig as OptimizerConfig
    from lockstep.config.train import ScheduleConfig as ScheduleConfig
    from lockstep.config.train import TrainConfig as TrainConfig

_FILES = {
    "CompileConfig": "compile", "Config": "schema", "DataConfig": "train", "LoraConfig": "train",
    "ModelConfig": "model", "OptimizerConfig": "train", "RopeScaling": "model", "ScheduleConfig": "train",
    "Section": "section", "ServeConfig": "serve", "TrainConfig": "train", "load_config": "load", "save_config": "load",
}  # fmt: skip
"""Where each public name lives. It is imported when asked for: an engine has no use for what a run is told."""

__all__ = [
    "CompileConfig", "Config", "DataConfig", "LoraConfig", "ModelConfig", "OptimizerConfig", "RopeScaling",
    "ScheduleConfig", "Section", "ServeConfig", "TrainConfig", "load_config", "save_config",
]  # fmt: skip

__getattr__ = importer(__name__, _FILES)
