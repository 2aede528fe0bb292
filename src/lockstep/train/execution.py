"""How one process executes a step: operator by operator, block by block, or as programs (`docs/compile.md`).

Every way gives the same bits. What cannot be compiled runs operator by operator, with one line saying why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.compile import Blockwise, Cache, CannotCompile, Compiler, GlobalNorm, MicroBatch, NotCached, not_possible
from lockstep.compile.report import explained
from lockstep.config import CompileConfig
from lockstep.model.decoder import Decoder
from lockstep.train.compiled import CompiledUpdate, compiler_of
from lockstep.train.data import Batch
from lockstep.train.optimizer import AdamW
from lockstep.train.step import (
    Compute,
    Forward,
    Micro,
    Shares,
    StepGradient,
    eager,
    logprob_sum,
    step_gradient,
    sum_gradients,
)
from lockstep.train.tree import global_norm

Note = Callable[[str], None]
Stop = Callable[[], bool]


class Execution(Protocol):
    """What a training step is made of."""

    def gradient(self, batches: Sequence[Batch], stop: Stop) -> StepGradient | None:
        """The gradient of a global batch; None if ``stop`` said so between two micro-batches."""

    def norm(self, gradient: list[Tensor]) -> float:
        """The global norm; NaN or infinite if any element is."""

    def update(self, gradient: list[Tensor], lr: float, scale: float) -> None:
        """One optimizer update by the gradient times scale; the gradient is not needed any more."""


def execution(
    decoder: Decoder,
    compute: Compute,
    parameters: Mapping[str, nn.Parameter],
    optimizer: AdamW,
    z_loss: float,
    config: CompileConfig,
    rows: int,
    note: Note,
    cache: Cache | None = None,
    page: Path | None = None,
    only_cached: bool = False,
    group: int = 1,
) -> Execution:
    """The execution at the level that the configuration names. rows: the most tokens of a micro-batch. cache: None
    takes the user's, where the configuration wants one. page: where the graphs are written, if they are asked for.
    only_cached: raise NotCached instead of compiling what is not in the cache. group: micro-batches of a canonical
    group."""
    plain, level = Eager(decoder, compute, parameters, optimizer, z_loss, group), config.of_model
    if level == "O0" or compute.ops.numerics == "fast":
        if config.explain:
            why = "compile.level is O0" if level == "O0" else "train.numerics is fast"
            note(f"compile.explain: {why}, so operators run one by one and nothing is compiled that could be explained")
        return plain
    compiler = compiler_of(config, note, cache, only_cached)
    found: Execution = plain
    try:
        if level == "O2":
            found = Whole(plain, compiler, rows)
        else:
            plain.forward = Blockwise(decoder, compute.ops, compute.dtype, compiler, rows)
    except NotCached:
        raise
    except CannotCompile as error:
        note(not_possible(level, error))
    if config.explain:
        note(explained(compiler.reports, compiler.seconds, f"Compiled at {level}", page))
    return found


class Eager:
    """Operator by operator under autograd; with `forward` replaced, block by block."""

    def __init__(
        self,
        decoder: Decoder,
        compute: Compute,
        parameters: Mapping[str, nn.Parameter],
        optimizer: AdamW,
        z_loss: float,
        group: int = 1,
    ) -> None:
        """group: micro-batches of a canonical group."""
        self.decoder, self.compute, self.parameters = decoder, compute, dict(parameters)
        self.optimizer, self.z_loss, self.group = optimizer, z_loss, group
        self.forward: Forward | None = None

    def gradient(self, batches: Sequence[Batch], stop: Stop) -> StepGradient | None:
        run = (self.decoder, self.compute, self.parameters, batches, self.z_loss, stop, self.forward)
        return step_gradient(*run, self.group)

    def micro(self, micro_batches: int) -> Micro:
        """How one of so many micro-batches is run."""
        return eager(self.decoder, self.compute, self.parameters, self.z_loss, micro_batches, self.forward)

    def norm(self, gradient: list[Tensor]) -> float:
        return global_norm(gradient, self.compute.ops)

    def update(self, gradient: list[Tensor], lr: float, scale: float) -> None:
        self.optimizer.step(gradient, lr, scale)


class Whole:
    """A micro-batch, the norm and the update as one program each. What is larger than planned runs eagerly.

    A gradient that is added into another right away, or that is the only one of its step, lies within the program's
    memory; the others in lists of their own, which are used again.
    """

    def __init__(self, eager: Eager, compiler: Compiler, rows: int) -> None:
        self._eager, self._compiler, self._rows = eager, compiler, rows
        self._shapes = [p.shape for p in eager.parameters.values()]
        self._made, self._free = 0, list[list[Tensor]]()
        self._norm = GlobalNorm(self._shapes, eager.compute.ops, compiler)
        self._program: MicroBatch | None = self._compiled()
        self._update = CompiledUpdate(eager.optimizer)

    def gradient(self, batches: Sequence[Batch], stop: Stop) -> StepGradient | None:
        if self._program is not None and not self._program.unchanged:
            self._compile_again()
        run = partial(self._micro, len(batches), itertools.count())
        return sum_gradients(run, batches, stop, self._eager.group, self._recycle)

    def norm(self, gradient: list[Tensor]) -> float:
        return self._norm(gradient)

    def update(self, gradient: list[Tensor], lr: float, scale: float) -> None:
        self._update(gradient, lr, scale)
        self._recycle(gradient)

    def _micro(self, count: int, numbers: Iterator[int], batch: Batch, weight: float) -> Shares:
        """The next of so many micro-batches."""
        number = next(numbers)
        if self._program is None or len(batch.tokens) > self._rows:
            return self._eager.micro(count)(batch, weight)
        # Added at once: those of a group after its first; of groups of one the right ones of pairs, and the last.
        at_once = number % max(self._eager.group, 2) > 0 or (self._eager.group == 1 and number == count - 1)
        gradient = self._program.place_of_gradients if at_once else self._free.pop() if self._free else self._memory()
        weights = torch.full(batch.targets.shape, weight, dtype=torch.float32)
        balance = self._eager.decoder.config.router_aux_loss / count
        objective, logprobs = self._program.run(batch.tokens, batch.targets, batch.packed, weights, gradient, balance)
        return objective, -weight * logprob_sum(logprobs, batch.targets), gradient

    def _memory(self) -> list[Tensor]:
        """For the gradients of a micro-batch."""
        self._made += 1
        return [torch.empty(shape) for shape in self._shapes]

    def _recycle(self, gradient: list[Tensor]) -> None:
        """Take gradients that are not needed any more; no more than were made here, as eager ones come in too."""
        within = self._program is not None and gradient is self._program.place_of_gradients
        if not within and len(self._free) < self._made:
            self._free.append(gradient)

    def _compiled(self) -> MicroBatch:
        eager = self._eager
        stage = (eager.decoder, eager.compute.ops, eager.compute.dtype, eager.parameters, eager.z_loss)
        return MicroBatch(*stage, self._compiler, self._rows)

    def _compile_again(self) -> None:
        self._compiler.note("the model was changed after it was compiled: compiling again")
        self._program = None
        try:
            self._program, self._update = self._compiled(), CompiledUpdate(self._eager.optimizer)
        except CannotCompile as error:
            self._compiler.note(not_possible("O2", error))
            self._free, self._made = [], 0
