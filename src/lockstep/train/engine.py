"""How a step is computed: by this process alone, or by the ranks of a mesh together. The loop does not see which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.model import Model
from lockstep.train.data import Batch, Dataset
from lockstep.train.evaluate import Evaluation, evaluate
from lockstep.train.execution import Eager, Execution, execution
from lockstep.train.optimizer import AdamW
from lockstep.train.signals import StopRequest
from lockstep.train.step import Compute, StepGradient
from lockstep.train.when_to_compile import Chosen


class Engine(Protocol):
    """What the loop asks for. On a mesh every rank asks for the same, in the same order."""

    def stopping(self, stop: StopRequest) -> bool:
        """Whether anybody was asked to stop; then ``stop`` says so on every rank."""

    def gradient(self, batches: Sequence[Batch], z_loss: float, stop: Callable[[], bool]) -> StepGradient | None:
        """The gradient of a global batch, of the parameters that this rank updates; None if ``stop`` said so."""

    def norm(self, found: StepGradient) -> float:
        """The norm of the whole model's gradient."""

    def update(self, found: StepGradient, lr: float, scale: float) -> None:
        """One optimizer step."""

    def evaluate(self, data: Dataset, sequences: int, micro_batch: int) -> Evaluation | None:
        """The loss on held-out documents; None if nothing is held out."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """The whole model's trained parameters and moments, by name; None on ranks that do not write."""

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int) -> None:
        """Take the whole model's parameters and moments."""

    def expected(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Tensors of the shapes that `state` gives and `load` takes (values mean nothing)."""

    def whole_model(self) -> Model | None:
        """The whole model; None on ranks that do not write."""

    def report(self) -> dict[str, object]:
        """What this engine adds to a step's line of metrics."""


class HoldsAll:
    """What an engine of a single process does alike, whatever it trains: it holds every parameter and moment."""

    parameters: dict[str, nn.Parameter]
    optimizer: AdamW

    def stopping(self, stop: StopRequest) -> bool:
        return bool(stop)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {name: p.detach() for name, p in self.parameters.items()}, self.optimizer.state_dict()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])
        self.optimizer.load_state_dict(moments, updates)

    def expected(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.state()

    def report(self) -> dict[str, object]:
        return {}


class OneProcess(HoldsAll):
    """The engine of a single process."""

    def __init__(
        self,
        model: Model,
        parameters: dict[str, nn.Parameter],
        optimizer: AdamW,
        config: Config,
        note: Callable[[str], None],
    ) -> None:
        """note: where one-line messages of the compiler go."""
        self.model, self.parameters, self.optimizer = model, parameters, optimizer
        self._config, self._note = config, note
        train = config.train
        eager = Eager(model.decoder, self._compute, parameters, optimizer, train.z_loss, train.group_size)
        self.execution = Chosen(config, eager, self._at_level, note)

    def gradient(self, batches: Sequence[Batch], z_loss: float, stop: Callable[[], bool]) -> StepGradient | None:
        return self.execution.before_step(self.optimizer.step_count).gradient(batches, stop)

    def norm(self, found: StepGradient) -> float:
        return self.execution.now.norm(found.gradient)

    def update(self, found: StepGradient, lr: float, scale: float) -> None:
        self.execution.now.update(found.gradient, lr, scale)

    def evaluate(self, data: Dataset, sequences: int, micro_batch: int) -> Evaluation | None:
        return evaluate(self.model.decoder, self._compute, data, sequences, micro_batch)

    def whole_model(self) -> Model:
        return self.model

    def _at_level(self, only_cached: bool) -> Execution:
        """Made for a step, so that what only looks at a run compiles nothing."""
        train, data = self._config.train, self._config.data
        rows = train.micro_batch * data.seq_len
        run = (self.model.decoder, self._compute, self.parameters, self.optimizer, train.z_loss)
        page = Path(train.out).expanduser() / "compile.html"
        how = (self._config.compile, rows, self._note)
        return execution(*run, *how, page=page, only_cached=only_cached, group=train.group_size)

    @property
    def _compute(self) -> Compute:
        return Compute(self.model.ops, self.model.dtype)
