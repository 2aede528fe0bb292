"""The configuration: typed sections, YAML in and out, errors that name the nearest valid key."""

from lockstep.config.compile import CompileConfig
from lockstep.config.load import load_config, save_config
from lockstep.config.model import ModelConfig, RopeScaling
from lockstep.config.schema import Config
from lockstep.config.section import Section
from lockstep.config.serve import ServeConfig
from lockstep.config.train import DataConfig, LoraConfig, OptimizerConfig, ScheduleConfig, TrainConfig

__all__ = [
    "CompileConfig",
    "Config",
    "DataConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RopeScaling",
    "ScheduleConfig",
    "Section",
    "ServeConfig",
    "TrainConfig",
    "load_config",
    "save_config",
]
