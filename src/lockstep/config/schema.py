"""The whole configuration of a run: one section for each room."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator
from pydantic_core import to_jsonable_python

from lockstep.config.check import check
from lockstep.config.compile import CompileConfig
from lockstep.config.model import ModelConfig
from lockstep.config.parallel import ParallelConfig
from lockstep.config.section import Section
from lockstep.config.serve import ServeConfig
from lockstep.config.train import DataConfig, LoraConfig, OptimizerConfig, ScheduleConfig, TrainConfig

DEFAULT_MODEL = {
    "family": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_layers": 6,
    "num_heads": 4, "num_kv_heads": 2, "max_positions": 1024, "tie_embeddings": True,
}  # fmt: skip
"""The shape of a new model when none is given: 5.5 M parameters, minutes of training on two cores."""


def _default_model() -> ModelConfig:
    return ModelConfig.model_validate(DEFAULT_MODEL)


class Config(Section):
    """Everything that a run depends on. It is saved, resolved, with the run."""

    model: str | ModelConfig = Field(default_factory=_default_model)
    """A directory, a GGUF file or an alias to load, or the shape of a new model (a small Llama when not given)."""
    data: DataConfig = Field(default_factory=DataConfig)
    """What is trained on."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """The training loop."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """AdamW."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Low-rank adapters."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Processes and how the work is laid over them."""
    compile: CompileConfig = Field(default_factory=CompileConfig)
    """The level compiler."""
    serve: ServeConfig = Field(default_factory=ServeConfig)
    """The server and its engine."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, validate: ModelWrapValidatorHandler[Config], info: ValidationInfo) -> Config:
        """What Python code gives is read as a file is: a path may stand for text; mistakes are told in our words."""
        try:
            return validate(value)
        except ValidationError:
            if info.mode == "json" or not isinstance(value, dict):
                raise
            read = check(cls, to_jsonable_python(value, fallback=repr), "Config")
            return validate({name: getattr(read, name) for name in read.model_fields_set})
