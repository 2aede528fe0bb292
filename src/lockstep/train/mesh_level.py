"""The compile level of a rank of a mesh: how it computes its groups of layers, and its update (`docs/compile.md`).

O0: operators one by one. O1: each kind of block's forward, backward and weight gradients are programs. O2: so are a
whole group's, with embedding and loss, and the update. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lockstep.compile import (
    BlockCalls,
    CannotCompile,
    Compiler,
    Flight,
    GroupPrograms,
    Placer,
    Span,
    not_possible,
)
from lockstep.compile.describe import Unchanged
from lockstep.compile.report import explained
from lockstep.config import Config
from lockstep.memory.layers import recomputing
from lockstep.memory.offload import Offload
from lockstep.model import Model
from lockstep.ops import operators
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.nodes import Group
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Pipeline, Work
from lockstep.train.compiled import CompiledUpdate, compiler_of
from lockstep.train.data import Batch
from lockstep.train.optimizer import AdamW
from lockstep.train.step import logprob_sum

Ended = Callable[[int, float, float], None]
"""(micro-batch, its share of the objective, of the loss)"""


class LevelOnMesh:
    """The level that the configuration names, from the first step on; O0 where that is not possible, with one line."""

    def __init__(
        self,
        mesh: Mesh,
        part: Partition,
        model: Model,
        pipeline: Pipeline,
        optimizer: AdamW,
        again: frozenset[int],
        offload: Offload | None,
        config: Config,
        note: Callable[[str], None],
    ) -> None:
        """again: the layers that are recomputed. offload: moves the activations of others. It moves what a block's
        program keeps, not what a whole group's does, so there the level of groups is O1."""
        self.mesh, self.part, self.model, self.pipeline = mesh, part, model, pipeline
        self.optimizer, self.again, self.config, self.note = optimizer, again, config, note
        self.offload = offload
        self.rows = config.train.micro_batch * config.data.seq_len
        self._plain = pipeline.call
        self._asked = config.compile.of_model != "O0" and model.ops.numerics == "bitwise"
        self._uncompiled = not_compiled(part, config)
        self._unchanged: Unchanged | None = None
        self._groups: dict[int, GroupPrograms] = {}
        self._update: CompiledUpdate | None = None

    def prepare(self) -> None:
        """Compile before the first step, and when the model was changed. All ranks call it; where one cannot be
        compiled, all run at O0: what ranks send each other depends on the level."""
        if not self._asked or self._unchanged:
            return
        if self._unchanged is not None:
            self.note("the model was changed after it was compiled: compiling again")
        reason = self._compile()
        failed = [rank for rank, flag in enumerate(self.mesh.world.gather(torch.tensor([float(bool(reason))]))) if flag]
        if failed:
            self._asked, self._groups, self._update, self.pipeline.call = False, {}, None, self._plain
            reason = reason or f"rank {failed[0]} could not be compiled"
            self.note(not_possible(self.config.compile.of_model, reason))

    def work(self, batches: Sequence[Batch], weight: float, ended: Ended) -> Work | None:
        """What computes the groups for these micro-batches; None: operators one by one, or block by block (O1).
        weight: of a loss token."""
        if not self._groups or any(len(batch.tokens) > self.rows for batch in batches):
            return None
        return _Programs(self._groups, batches, weight, ended)

    def update(self, gradients: list[Tensor], lr: float, scale: float) -> None:
        """One step of the optimizer."""
        if self._update is None:
            self.optimizer.step(gradients, lr, scale)
            return
        self._update(gradients, lr, scale)

    def _compile(self) -> str:
        """Why it cannot be, or nothing."""
        if self._uncompiled:
            return self._uncompiled
        how = self.config.compile
        compiler = compiler_of(how, self.note)
        try:
            self._programs(compiler)
        except CannotCompile as error:
            return str(error)
        self._unchanged = Unchanged(self.model.decoder, hooks=False)  # a hook on one rank alone would leave it waiting
        if how.explain:
            page = Path(self.config.train.out).expanduser() / "compile.html"
            title = f"Compiled at {how.of_model}, rank {self.mesh.rank}"
            self.note(explained(compiler.reports, compiler.seconds, title, page if self.mesh.first else None))
        return ""

    def _programs(self, compiler: Compiler) -> None:
        part, model, line = self.part, self.model, self.pipeline
        ops = part.operators(operators("bitwise"), captured=True)
        groups = {"tp": Group(self.mesh["tp"])} if self.mesh.shape.tp > 1 else {}
        placer, deferring = Placer(self.rows), part.table.split_backward
        if compiler.level == "O1" or self.offload is not None:
            spans = [part.stages.layers[group] for group in part.groups]
            queue = line.queue if deferring else None
            calls = BlockCalls(
                model.decoder, ops, model.dtype, spans, self.again, queue, compiler, placer, groups,
                recomputing(self.again),
            )  # fmt: skip
            line.call = calls if self.offload is None else self.offload.calling(calls)
            if compiler.level == "O2":
                self._update = CompiledUpdate(self.optimizer)
            return
        found = {}
        for group in part.groups:
            layers = part.stages.layers[group]
            span = Span(layers, group == 0, group == part.stages.groups - 1, self.again & set(layers), deferring)
            trained = line.of_group[group]
            how = (model.decoder, ops, model.dtype, self.config.train.z_loss, trained, compiler, placer, groups)
            found[group] = GroupPrograms(span, *how)
        with compiler.phase("build"):
            scratch = torch.empty(max(one.memory.scratch for one in found.values()), dtype=torch.uint8)
            for one in found.values():
                one.attach(scratch)
            self._groups, self._update = found, CompiledUpdate(self.optimizer)


def not_compiled(part: Partition, config: Config) -> str:
    """What of a layout is not made of programs in this version, in words; empty where all is."""
    if part.rows is not None:
        return "programs do not share rows among ranks (parallel.sequence_parallel, parallel.cp) in this version"
    if part.experts is not None:
        return "programs do not send rows to the ranks of their experts (parallel.ep) in this version"
    if config.parallel.fsdp > 1:
        level = config.parallel.fsdp
        return f"programs do not give gradients away layer by layer (parallel.fsdp {level}) in this version"
    return ""


@dataclass
class _Programs:
    """The `Work` of one step."""

    groups: dict[int, GroupPrograms]
    batches: Sequence[Batch]
    weight: float
    ended: Ended
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)

    def forward(self, group: int, m: int, x: Tensor | None) -> Tensor | None:
        made, batch = self.groups[group], self.batches[m]
        loss = None
        if made.span.last:
            loss = batch.targets, torch.full(batch.targets.shape, self.weight, dtype=torch.float32)
        flight, y = made.forward(batch.tokens, batch.packed, x, loss)
        if flight.logprobs is not None and flight.objective is not None:
            self.ended(m, float(flight.objective), -self.weight * logprob_sum(flight.logprobs, batch.targets))
        self.flights[group, m] = flight
        return y

    def backward(self, group: int, m: int, slope: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        return self.groups[group].backward(self.flights[group, m], slope)

    def weights(self, group: int, m: int) -> dict[str, Tensor]:
        return self.groups[group].weights(self.flights.pop((group, m)))

    def close(self) -> None:
        assert not self.flights, f"a table does every step once, and {list(self.flights)} were left"
