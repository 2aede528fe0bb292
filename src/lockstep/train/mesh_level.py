"""The compile level of a rank of a mesh: how it computes its groups of layers, and its update (`docs/compile.md`).

O0: operators one by one. O1: each kind of block's forward, backward and weight gradients are programs. O2: so are a
whole group's, with embedding and loss, and the update. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.compile import (
    BlockCalls,
    CannotCompile,
    Compiler,
    Flight,
    GroupPrograms,
    Placer,
    Pool,
    Span,
    not_possible,
)
from lockstep.compile.describe import Unchanged
from lockstep.compile.report import explained
from lockstep.config import Config
from lockstep.memory.layers import recomputing
from lockstep.memory.offload import Offload
from lockstep.model import Model
from lockstep.model.decoder import BlockCall
from lockstep.ops import Operators, operators
from lockstep.ops.cut_linear import Due
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.nodes import Group
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Pipeline, Put, Work, give_of_experts, give_whole
from lockstep.train.compiled import CompiledUpdate, compiler_of
from lockstep.train.data import Batch
from lockstep.train.optimizer import AdamW
from lockstep.train.step import logprob_sum

_MOST_KINDS = 16
"""Remainders of numbers of rows at most for which each has programs of its own: each takes as long to compile."""

Ended = Callable[[int, float, float], None]
"""(micro-batch, its share of the objective, of the loss)"""
_NONE = -1
"""In the place of a rank's messages where it could not be compiled."""


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
        self._unchanged: Unchanged | None = None
        self._messages = 0
        """That its programs begin, as one number."""
        self._groups: dict[int, dict[int, GroupPrograms]] = {}
        """By what numbers of rows leave, where ranks share them (otherwise one entry), and by group."""
        self._update: CompiledUpdate | None = None

    def prepare(self) -> None:
        """Compile before the first step, and when the model was changed, on whichever rank. All ranks call it; where
        one cannot be compiled, all run at O0: what ranks send each other depends on the level."""
        if not self._asked:
            return
        if self._unchanged is not None:
            if not self._where(not self._unchanged):
                return
            self.note("the model was changed after it was compiled: compiling again")
        reason = self._compile()
        reason = self._other_order(bool(reason)) or reason
        if failed := self._where(bool(reason)):
            self._asked, self._groups, self._update, self.pipeline.call = False, {}, None, self._plain
            reason = reason or f"rank {failed[0]} could not be compiled"
            self.note(not_possible(self.config.compile.of_model, reason))

    def _where(self, here: bool) -> list[int]:
        """The ranks on which something is so."""
        return [rank for rank, flag in enumerate(self.mesh.world.gather(torch.tensor([float(here)]))) if flag]

    def _other_order(self, failed: bool) -> str:
        """Why ranks would wait for each other for ever, or nothing: each has made its programs by itself. All ranks
        call it; those that failed have made none, which says nothing about an order."""
        mine, found = torch.tensor([_NONE if failed else self._messages]), ""
        for axis in map(self.mesh.__getitem__, self.part.named_axes):
            orders = {int(one) for one in axis.gather(mine)}
            if len(orders) > 1 and _NONE not in orders:
                found = (
                    f"the programs of the ranks along {axis.name} begin their messages in different orders. Leave the "
                    "pass out that does it, for instance with --compile.disable-pass bucket-collectives"
                )
        return found

    def work(self, batches: Sequence[Batch], weight: float, ended: Ended) -> Callable[[Put], Work] | None:
        """Makes what computes the groups for these micro-batches; None: operators one by one, or block by block (O1).
        weight: of a loss token."""
        unit, sizes = self.part.row_unit, [len(batch.tokens) for batch in batches]
        if not all(unit <= size <= self.rows and size % unit in self._groups for size in sizes):
            return None
        return partial(_Programs, self.pipeline, self._groups, unit, batches, weight, ended)

    def update(self, gradients: list[Tensor], lr: float, scale: float) -> None:
        """One step of the optimizer."""
        if self._update is None:
            self.optimizer.step(gradients, lr, scale)
            return
        self._update(gradients, lr, scale)

    def _compile(self) -> str:
        """Why it cannot be, or nothing."""
        if self.rows < self.part.row_unit:
            return f"a micro-batch of {self.rows} rows is too small: ranks that share rows take {self.part.row_unit}"
        how = self.config.compile
        compiler = compiler_of(how, self.note)
        try:
            self._programs(compiler)
        except CannotCompile as error:
            return str(error)
        self._messages = compiler.messages()
        # A hook on one rank alone would leave it waiting for the others; sharded weights come and go.
        self._unchanged = Unchanged(self.model.decoder, hooks=False, memory=self.part.store is None)
        if how.explain:
            page = Path(self.config.train.out).expanduser() / "compile.html"
            title = f"Compiled at {how.of_model}, rank {self.mesh.rank}"
            self.note(explained(compiler.reports, compiler.seconds, title, page if self.mesh.first else None))
        return ""

    def _programs(self, compiler: Compiler) -> None:
        mesh, part = self.mesh, self.part
        placer = Placer(self.rows // part.row_unit)
        axes = {name: Group(mesh[name]) for name in part.named_axes}
        unit, bitwise = part.row_unit, operators("bitwise")
        # Every remainder, or, where there are many (rows that go by tiles of 32), that of a full micro-batch alone.
        rests = range(unit) if unit <= _MOST_KINDS else [self.rows % unit]
        kinds = {rest: part.operators(bitwise, captured=True, rest=rest) for rest in rests}
        if compiler.level == "O1" or self.offload is not None:
            calls = {rest: self._blocks(compiler, ops, placer, axes) for rest, ops in kinds.items()}
            call: BlockCall = calls[0] if unit == 1 else partial(_by_rest, calls, unit, recomputing(self.again))
            call = call if self.offload is None else self.offload.calling(call)
            self.pipeline.call = call if part.store is None else part.store.calling(call)
            if compiler.level == "O2":
                self._update = CompiledUpdate(self.optimizer)
            return
        pools = {group: Pool() for group in part.groups}
        found = {rest: self._stages(compiler, ops, placer, axes, pools) for rest, ops in kinds.items()}
        with compiler.phase("build"):
            every = [one for groups in found.values() for one in groups.values()]
            scratch = torch.empty(max(one.memory.scratch for one in every), dtype=torch.uint8)
            for one in every:
                one.attach(scratch)
            self._groups, self._update = found, CompiledUpdate(self.optimizer)

    def _blocks(self, compiler: Compiler, ops: Operators, placer: Placer, axes: dict[str, Group]) -> BlockCalls:
        part, model = self.part, self.model
        spans = [part.stages.layers[group] for group in part.groups]
        queue = self.pipeline.queue if part.table.split_backward else None
        how = (compiler, placer, axes, recomputing(self.again))
        of_experts = None if part.experts is None else self.pipeline.queue
        return BlockCalls(model.decoder, ops, model.dtype, spans, self.again, queue, *how, of_experts=of_experts)

    def _stages(
        self, compiler: Compiler, ops: Operators, placer: Placer, axes: dict[str, Group], pools: dict[int, Pool]
    ) -> dict[int, GroupPrograms]:
        part, model, line, found = self.part, self.model, self.pipeline, dict[int, GroupPrograms]()
        for group in part.groups:
            layers, last = part.stages.layers[group], part.stages.groups - 1
            span = Span(layers, group == 0, group == last, self.again & set(layers), part.table.split_backward)
            how = (model.decoder, ops, model.dtype, self.config.train.z_loss, compiler, placer, axes)
            found[group] = GroupPrograms(span, *how, pools[group], line.layerwise, part.store, line.queue)
        return found


def _by_rest(
    calls: Mapping[int, BlockCall], unit: int, plain: BlockCall, layer: int, block: nn.Module, ops: Operators,
    x: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    """A `BlockCall` of those for some remainders of the numbers of rows, and the plain one for others."""
    (batch, *_) = rest
    return calls.get(len(batch.positions) % unit, plain)(layer, block, ops, x, *rest)


@dataclass
class _Programs:
    """The `Work` of one step."""

    line: Pipeline
    kinds: Mapping[int, dict[int, GroupPrograms]]
    unit: int
    batches: Sequence[Batch]
    weight: float
    ended: Ended
    give: Put
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    due: dict[tuple[int, int], list[Due]] = field(default_factory=dict)
    """Gradients of experts that wait for the step of weights."""

    def forward(self, group: int, m: int, x: Tensor | None) -> Tensor | None:
        made, batch = self._programs(group, m), self.batches[m]
        loss = None
        if made.span.last:
            loss = batch.targets, torch.full(batch.targets.shape, self.weight, dtype=torch.float32)
        flight, y = made.forward(batch.tokens, batch.packed, x, loss, partial(self._left, m))
        if flight.logprobs is not None and flight.objective is not None:
            self.ended(m, float(flight.objective), -self.weight * logprob_sum(flight.logprobs, batch.targets))
        self.flights[group, m] = flight
        return y

    def backward(self, group: int, m: int, slope: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        found = self._programs(group, m).backward(self.flights[group, m], slope, partial(self._left, m))
        self.due[group, m] = self.line.queue.take()
        return found

    def weights(self, group: int, m: int) -> dict[str, Tensor]:
        give_of_experts(self.line, self.give, m, self.due.pop((group, m)))
        return self._programs(group, m).weights(self.flights.pop((group, m)), partial(self._left, m))

    def _programs(self, group: int, m: int) -> GroupPrograms:
        return self.kinds[len(self.batches[m].tokens) % self.unit][group]

    def _left(self, m: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is left of gradients when those that need not wait for the end of the step were given away."""
        if not self.line.table.split_backward:
            give_of_experts(self.line, self.give, m, self.line.queue.take())
        if self.line.layerwise:
            give_whole(self.line, self.give, m, found)
        return found

    def close(self) -> None:
        assert not self.flights, f"a table does every step once, and {list(self.flights)} were left"
