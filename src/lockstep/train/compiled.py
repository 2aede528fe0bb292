"""What every compiled run is made of, on one process and on a mesh: its compiler, and the optimizer's update."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import Tensor

from lockstep.compile import Cache, Compiler, Update
from lockstep.config import CompileConfig
from lockstep.memory.recompute import RecomputePolicy
from lockstep.train.optimizer import AdamW


def compiler_of(
    config: CompileConfig, note: Callable[[str], None], cache: Cache | None = None, only_cached: bool = False
) -> Compiler:
    """The compiler that the configuration names. cache: None takes the user's, where the configuration wants one.
    only_cached: capture nothing."""
    if cache is None and config.cache:
        cache = Cache()
    policy = RecomputePolicy(config.recompute)
    return Compiler(
        config.of_model, config.disable_pass, config.only_pass, cache, config.explain, note, policy, only_cached
    )


class CompiledUpdate:
    """`AdamW.step` as one program: of the tensors that the optimizer holds, made again where it holds others."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer = optimizer
        self._bind()

    def __call__(self, gradients: Sequence[Tensor], lr: float, scale: float) -> None:
        bound = self._tensors()
        if any(map(operator.is_not, bound, self._bound)) or [*map(Tensor.data_ptr, bound)] != self._memory:
            self._bind()
        self._program(gradients, *self._optimizer.advance(lr, scale))

    def _bind(self) -> None:
        optimizer = self._optimizer
        optimizer.check()
        self._bound = self._tensors()
        self._memory = [*map(Tensor.data_ptr, self._bound)]
        decays = [optimizer.decays(p) for p in optimizer.parameters.values()]
        self._program = Update(optimizer.parameters, optimizer.first, optimizer.second, decays)

    def _tensors(self) -> list[Tensor]:
        held = self._optimizer
        return [*held.parameters.values(), *held.first.values(), *held.second.values()]
