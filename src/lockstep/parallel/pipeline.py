"""One rank's part of a pipeline: it does the steps of its row of a table, in their order (docs/pipeline-schedules.md).

Whatever the table, every product and sum is that of a single process: a group's forward and backward are cut out of
the model's graph at its inputs, where values pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from lockstep.model.decoder import BlockCall, Decoder
from lockstep.model.split import expert_of
from lockstep.ops import Operators, Packed
from lockstep.ops.cut_linear import Due, WeightQueue, WholeGradient, deferring
from lockstep.ops.spread_experts import queueing
from lockstep.parallel.boundary import passed
from lockstep.parallel.collectives import Axis
from lockstep.parallel.mailbox import Letter, Mailbox, letters, settled
from lockstep.parallel.row_ranks import RankRows
from lockstep.parallel.schedules import Step, Table, embedding_rows
from lockstep.parallel.shards import unit_of
from lockstep.parallel.stages import TIED, Stages
from lockstep.parallel.weight_store import WeightStore

T = TypeVar("T")


class MicroBatch(Protocol):
    """What a forward pass reads: T tokens, int64 [T]."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def packed(self) -> Packed: ...


class Work(Protocol):
    """How this rank's groups compute the micro-batches of one step; the three come in this order for each pair of group
    and micro-batch. `Eager` (operator by operator) is one."""

    def forward(self, group: int, m: int, x: Tensor | None) -> Tensor | None:
        """x: the stream from the group before, which is kept; None for the first, which embeds. Returns the stream for
        the next group; None from the last, which ends in the objective."""

    def backward(self, group: int, m: int, slope: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """slope: the gradient of the stream that was returned; None for the last group. Returns that of x (None from
        the first group) and the gradients of parameters that are there by now."""

    def weights(self, group: int, m: int) -> dict[str, Tensor]:
        """The gradients of all other parameters; a parameter that has none is left out."""

    def close(self) -> None:
        """Everything was taken."""


Finish = Callable[[int, Tensor], Tensor]
"""(micro-batch, hidden [T, D] after the final norm) -> the objective, a scalar with gradient"""
Put = Callable[[str, int, Tensor], None]
"""(parameter, micro-batch, its whole gradient), called once for each pair. An expert of a mesh with ``ep`` has a
gradient of each micro-batch that these ranks do at a time: that of the m-th one of the rank at place i has number
``m ep + i``."""


class Pipeline:
    """Executes a table on the ranks of the ``pp`` axis; with one rank and one stage it is a plain loop.

    parameters: those of this rank that train, by whole-model name (a tied embedding also on the rank that only embeds
    with it). call: how blocks are called (recompute). rows: where ranks share a micro-batch's rows between layers,
    and each sends its own to the next stage. layerwise: gradients go to `Put` as soon as their layer's are made, not at
    the end of a step. store: where weights are sharded; what is not a layer is opened here.
    contexts: where ranks share a micro-batch's rows everywhere: a weight's gradient goes on from rank to rank.
    experts: where ranks hold the experts together; their gradients go to `Put` as soon as they are made.
    first_token: of those that this rank's rows of the embedding are for.
    """

    def __init__(
        self,
        axis: Axis,
        table: Table,
        stages: Stages,
        decoder: Decoder,
        ops: Operators,
        dtype: torch.dtype,
        parameters: Mapping[str, nn.Parameter],
        call: BlockCall,
        rows: RankRows | None = None,
        layerwise: bool = False,
        store: WeightStore | None = None,
        contexts: Axis | None = None,
        experts: Axis | None = None,
        first_token: int = 0,
    ) -> None:
        self.axis, self.table, self.stages, self.decoder, self.dtype = axis, table, stages, decoder, dtype
        self.call, self.parameters, self.rows = call, parameters, rows
        self.layerwise, self.store, self.contexts, self.experts = layerwise, store, contexts, experts
        self.first_token = first_token
        self.plain, self.queue = ops, WeightQueue()
        self.ops = deferring(ops, self.queue) if table.split_backward or contexts is not None else ops
        if experts is not None:
            self.ops = queueing(self.ops, self.queue)
        groups = [table.group(axis.index, chunk) for chunk in range(table.chunks)]
        self.names = {id(p): name for name, p in parameters.items()}
        self.of_group = {g: [n for n in parameters if g in stages.uses(n)] for g in groups}
        self.of_layer = {
            i: [n for n in parameters if n.startswith(f"layers.{i}.")] for g in groups for i in stages.layers[g]
        }
        self.shared = stages.tied and TIED in parameters and stages.groups > 1
        self.owns = {name for name in parameters if stages.group_of(name) in groups}
        self.spread = {name for name in parameters if experts is not None and expert_of(name) is not None}
        trains_tied = stages.tied and decoder.embed.weight.requires_grad
        self.order, self.settled = letters(table, trains_tied), settled(table)
        self.rows_after = embedding_rows(table) if self.shared and TIED in self.owns else {}
        self.current: Step | None = None
        """The step that is being done: for whoever watches."""

    def step(
        self,
        batches: Sequence[MicroBatch],
        finish: Finish,
        put: Put,
        work: Callable[[Put], Work] | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Forward and backward of all micro-batches. Gradients of the parameters that this rank owns go to ``put``.

        work: makes what computes in the place of operators one by one (then nothing calls ``finish``), of a `Put` for
        gradients that need not wait for the end of a step. ended: called when a step of the row is over.
        """
        given: set[tuple[str, int]] = set()

        def give(name: str, m: int, gradient: Tensor) -> None:
            given.add((name, m))
            put(name, m, gradient)

        how: Work = Eager(self, batches, finish, give) if work is None else work(give)
        run = _Run(self, batches, how, put, given=given)
        for position, step in enumerate(self.table.rows[self.axis.index]):
            for part in step.parts:
                run.do(part)
            run.take_rows(self.rows_after.get(position, []))
            ended()
        run.close()

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch], finish: Finish) -> None:
        """Forward only, one micro-batch after the other; ``finish`` is called on the rank of the last group."""
        rows = tuple(
            tuple(Step("F", m, c) for m in range(len(batches)) for c in range(self.table.chunks))
            for _ in range(self.table.stages)
        )
        table = Table("forward", self.table.stages, len(batches), self.table.chunks, self.table.placement, rows)
        work = Eager(self, batches, finish, _keep_none)
        run = _Run(self, batches, work, _keep_none, _forward_letters(table))
        for step in rows[self.axis.index]:
            run.do(step)
        run.close()


class _Run:
    """One execution of the table: what is held between steps."""

    def __init__(
        self,
        line: Pipeline,
        batches: Sequence[MicroBatch],
        work: Work,
        put: Put,
        order: dict[tuple[int, int], list[Letter]] | None = None,
        given: set[tuple[str, int]] | None = None,
    ) -> None:
        """given: parameters and micro-batches whose gradients `put` has had already; filled by whoever gives them."""
        self.line, self.batches, self.work, self.put = line, batches, work, put
        self.given = set() if given is None else given
        self.rows: dict[int, Tensor] = {}  # the tokens of a micro-batch, each once: rows of the embedding's gradient
        self.mail = Mailbox(
            line.axis, line.order if order is None else order, self._shape, line.settled if order is None else {}
        )
        self.early: dict[tuple[int, int], dict[str, Tensor]] = {}  # (group, micro-batch): gradients that B gave
        self.half: dict[int, Tensor] = {}  # of a tied embedding: one of the two uses' gradients
        self.taken: set[int] = set()  # micro-batches whose other half came from the first group

    def do(self, step: Step) -> None:
        self.line.current = step
        if self.line.rows is not None:
            self.line.rows.begin(len(self.batches[step.micro_batch].tokens))
        group = self.line.table.group(self.line.axis.index, step.chunk)
        if step.kind == "F":
            self._forward(group, step.micro_batch)
        if step.kind in ("B", "BW"):
            self._backward(group, step.micro_batch)
        if step.kind in ("W", "BW"):
            self._weights(group, step.micro_batch)

    def take_rows(self, numbers: Sequence[int]) -> None:
        """The first group's part of a tied embedding's gradient, of these micro-batches."""
        for m in numbers:
            self.taken.add(m)
            self._tied(m, self._dense(m, self.mail.take(Letter("tied", m, 0))))

    def close(self) -> None:
        """The tied gradients that are still on their way; then nothing of this run is left."""
        self.take_rows([m for m in sorted(self.half) if m not in self.taken])
        self.mail.close()
        self.work.close()
        left = [*self.early, *self.half]
        assert not left, f"a table does every step once, and {left} were left"

    def _forward(self, group: int, m: int) -> None:
        y = self.work.forward(group, m, None if group == 0 else self.mail.take(Letter("x", m, group - 1)))
        if y is not None:
            self.mail.send(Letter("x", m, group), y)

    def _backward(self, group: int, m: int) -> None:
        line = self.line
        last = group == line.stages.groups - 1
        dx, found = self.work.backward(group, m, None if last else self.mail.take(Letter("dx", m, group + 1)))
        if dx is not None:
            self.mail.send(Letter("dx", m, group), dx)
        if group == 0 and line.shared and TIED not in line.owns:
            self.mail.send(Letter("tied", m, 0), self._rows(m, found.pop(TIED, None)))
        self.early[group, m] = found

    def _weights(self, group: int, m: int) -> None:
        line = self.line
        found = self.early.pop((group, m))
        for name, value in self.work.weights(group, m).items():
            found[name] = found[name].add_(value) if name in found else value
        for name in line.of_group[group]:
            if name not in line.owns or name in line.spread or (name, m) in self.given:
                continue
            value = found.pop(name) if name in found else torch.zeros_like(line.parameters[name])
            if name == TIED and line.shared:
                self._tied(m, value)
            else:
                self.put(name, m, value)

    def _tied(self, m: int, value: Tensor) -> None:
        """The gradient of one use of the tied embedding; with the other it is whole. Two floats add in either order."""
        other = self.half.pop(m, None)
        if other is None:
            self.half[m] = value
        else:
            self.put(TIED, m, other.add_(value))

    def _rows(self, m: int, gradient: Tensor | None) -> Tensor:
        """The rows of an embedding's gradient that a micro-batch touched; zeros where it was frozen meanwhile."""
        weight = self.line.parameters[TIED]
        return torch.zeros(len(self._tokens(m)), *weight.shape[1:]) if gradient is None else gradient[self._tokens(m)]

    def _dense(self, m: int, rows: Tensor) -> Tensor:
        whole = torch.zeros_like(self.line.parameters[TIED])
        whole[self._tokens(m)] = rows
        return whole

    def _tokens(self, m: int) -> Tensor:
        """Rows of this rank's tied embedding; at least one, as no message is empty."""
        if m not in self.rows:
            tokens, held = self.batches[m].tokens - self.line.first_token, len(self.line.parameters[TIED])
            found = torch.unique(tokens[(tokens >= 0) & (tokens < held)])
            self.rows[m] = found if len(found) else found.new_zeros(1)
        return self.rows[m]

    def _shape(self, letter: Letter) -> tuple[int, ...]:
        batch, width = self.batches[letter.micro_batch], self.line.decoder.config.hidden_size
        if letter.kind == "tied":
            return len(self._tokens(letter.micro_batch)), width
        rows, count = self.line.rows, len(batch.tokens)
        return count if rows is None else rows.share(count), width


class Eager:
    """Groups through autograd: each one's graph is cut out of the model's at its input, where values pass unchanged."""

    def __init__(self, line: Pipeline, batches: Sequence[MicroBatch], finish: Finish, give: Put) -> None:
        """give: takes gradients that need not wait for the end of a step."""
        self.line, self.batches, self.finish, self.give = line, batches, finish, give
        # (group, micro-batch): input, unless the group embeds, and output
        self.graph: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.due: dict[tuple[int, int], list[Due]] = {}  # what W has left to do
        self.halves: dict[tuple[int, int], set[str]] = {}  # parameters of whose gradients B made a part

    def forward(self, group: int, m: int, x: Tensor | None) -> Tensor | None:
        line, batch, recorded = self.line, self.batches[m], torch.is_grad_enabled()
        ops = line.ops if recorded else line.plain
        if x is None:
            with nullcontext() if line.store is None else line.store.held(["embed"]):
                x = line.decoder.start(ops, batch.tokens, line.dtype)
        else:
            x = x.detach().requires_grad_(recorded)
        layers, rope = line.stages.layers[group], line.decoder.rope_tables(batch.packed)
        y = line.decoder.blocks(ops, x, batch.packed, rope, layers, None, line.dtype, self._calling(m))
        last = group == line.stages.groups - 1
        if last:
            self._tail(WeightStore.open)
            y = self.finish(m, line.decoder.norm(ops, y, line.dtype))
            if not recorded:
                self._tail(WeightStore.close)
        if recorded:
            self.graph[group, m] = None if group == 0 else x, y
        return None if last else y.detach()

    def backward(self, group: int, m: int, slope: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        line = self.line
        x, y = self.graph.pop((group, m))
        if y.requires_grad:
            torch.autograd.backward(y, slope)
        if slope is None:
            self._tail(WeightStore.close)
        found = {}
        for name in line.of_group[group]:
            parameter = line.parameters[name]
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        self.due[group, m] = line.queue.take()
        if line.layerwise:
            self._give(m, found, {line.names[id(due.weight)] for due in self.due[group, m]})
            self.halves[group, m] = set(found)
        return (None if x is None else x.grad), found

    @torch.no_grad()  # a gradient with a graph would keep this micro-batch until the step ends
    def weights(self, group: int, m: int) -> dict[str, Tensor]:
        found, halves = {}, self.halves.pop((group, m), set())
        for name, value in self._computed(m, self.due.pop((group, m))):
            found[name] = value
            if self.line.layerwise:
                self._give(m, found, halves)
        return found

    def _calling(self, m: int) -> BlockCall:
        """How blocks are called for this micro-batch."""
        line = self.line
        by_layer = line.layerwise or line.contexts is not None or line.experts is not None
        if not by_layer or line.table.split_backward or not torch.is_grad_enabled():
            return line.call

        def call(layer: int, block: nn.Module, ops: Operators, x: Tensor, *rest: object) -> Tensor:
            return line.call(layer, block, ops, passed(x, lambda: self._layer_done(layer, m)), *rest)

        return call

    def _layer_done(self, layer: int, m: int) -> None:
        """A layer's backward is over: its gradients need not wait for the other layers'."""
        line = self.line
        for name, value in self._computed(m, line.queue.take()):
            line.parameters[name].grad = value
        if line.layerwise:
            found = {}
            for name in line.of_layer[layer]:
                parameter = line.parameters[name]
                if parameter.grad is not None:
                    found[name], parameter.grad = parameter.grad, None
            self._give(m, found, set())

    def _give(self, m: int, found: dict[str, Tensor], halves: set[str]) -> None:
        give_whole(self.line, self.give, m, found, halves)

    def _computed(self, m: int, work: list[Due]) -> Iterator[tuple[str, Tensor]]:
        """The gradients of weights that were put off, by name; those of spread experts are given away."""
        line, work = self.line, give_of_experts(self.line, self.give, m, work)
        names = [line.names[id(due.weight)] for due in work]
        whole = line.contexts is None or all(isinstance(due.gradient, WholeGradient) for due in work)
        each = _letting_go(work)  # what a gradient is made of goes as they are made
        if whole:
            values: Iterable[Tensor] = (due.gradient() for due in each)
        else:
            assert line.contexts is not None
            values = _letting_go(line.contexts.hand_on_all((due.gradient, due.weight.shape) for due in each))
        yield from zip(names, values, strict=True)

    def _tail(self, change: Callable[[WeightStore, str], None]) -> None:
        """Final norm and head are open from a micro-batch's loss to its backward, which mostly follows at once."""
        if self.line.store is not None:
            for unit in ("head", "embed") if self.line.stages.tied else ("head",):
                change(self.line.store, unit)

    def close(self) -> None:
        left = [*self.graph, *self.due]
        assert not left, f"a table does every step once, and {left} were left"


def give_whole(line: Pipeline, give: Put, m: int, found: dict[str, Tensor], halves: Collection[str] = ()) -> None:
    """Give away what is whole of these gradients of a micro-batch: not those that have a part from elsewhere (halves,
    and an embedding that is the head too)."""
    shared = TIED if line.stages.tied else None
    for name in [n for n in found if n in line.owns and n not in halves and n != shared]:
        give(name, m, found.pop(name))


def give_of_experts(line: Pipeline, give: Put, m: int, work: list[Due]) -> list[Due]:
    """Give away the gradients of spread experts that were put off, layer by layer, as those of all sources add up;
    returns the others."""
    spread = [due for due in work if due.source is not None]
    for _, layer in groupby(spread, key=lambda due: unit_of(line.names[id(due.weight)])):
        for due in sorted(layer, key=lambda due: due.source or 0):
            assert line.experts is not None
            assert due.source is not None
            give(line.names[id(due.weight)], m * line.experts.size + due.source, due.gradient())
    return [due for due in work if due.source is None]


def _letting_go(items: list[T]) -> Iterator[T]:
    """The items in their order, each taken out of the list."""
    items.reverse()
    while items:
        yield items.pop()


def _keep_none(name: str, micro_batch: int, gradient: Tensor) -> None:
    """The `Put` of a pass without gradients."""


def _forward_letters(table: Table) -> dict[tuple[int, int], list[Letter]]:
    """What is sent when every device goes through the micro-batches in turn, forward only."""
    found: dict[tuple[int, int], list[Letter]] = {}
    for device, row in enumerate(table.rows):
        for step in row:
            group = table.group(device, step.chunk)
            if group + 1 < table.groups and (receiver := table.holder(group + 1)[0]) != device:
                found.setdefault((device, receiver), []).append(Letter("x", step.micro_batch, group))
    return found
