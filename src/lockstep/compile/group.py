"""Level O2 of a pipeline: a group of layers as programs, one for each kind of step of a schedule table.

    forward           embedding (the first group), blocks, loss with its gradient (the last)
    backward          the blocks in reverse: the gradient of the group's input, and those of the weights
    weights           where a table puts those off, a program of their own

Several micro-batches are in flight. What one keeps from its forward to its backward pass lies in one piece of memory,
its `kept`; what weights' gradients need beyond that in another, its `later`. Both come from a pool, so that a step
allocates as many as are ever in flight, once. Intermediates of all groups of a rank share one scratch area.

Where gradients or weights are sharded, or experts shared out, a kind of step is a program for each layer: its gradients
are given away before the next layer's are made, and its weights are gathered only while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest

import torch
from torch import Tensor

from lockstep.compile.compiler import Compiler
from lockstep.compile.describe import refuse_watched
from lockstep.compile.group_memory import Span, plan_group
from lockstep.compile.group_steps import Backward, Flight, Forward, Gradients, Part, StepProgram, Weights
from lockstep.compile.layers import compiled_layers
from lockstep.compile.program import Placer
from lockstep.compile.recipe import Place
from lockstep.compile.stage import embedding_stage, loss_stage, tensors_of
from lockstep.model.decoder import Decoder
from lockstep.ops import Operators, Packed
from lockstep.ops.cut_linear import WeightQueue
from lockstep.parallel.nodes import Group
from lockstep.parallel.weight_store import WeightStore

Give = Callable[[Gradients], Gradients]
"""Takes gradients as soon as they are made; returns those that it left."""


class GroupPrograms:
    """The programs of one group, for micro-batches of up to the placer's rows. `attach` makes them runnable."""

    def __init__(
        self,
        span: Span,
        decoder: Decoder,
        ops: Operators,
        dtype: torch.dtype,
        z_loss: float,
        compiler: Compiler,
        placer: Placer,
        groups: Mapping[str, Group],
        pool: Pool | None = None,
        layerwise: bool = False,
        store: WeightStore | None = None,
        queue: WeightQueue | None = None,
    ) -> None:
        """Compiles at once; CannotCompile where that is not possible. placer: for so many rows, shared by the groups.
        groups: the ranks that the operators add over, by axis. pool: shared by those who are not in flight for the same
        micro-batch. layerwise: a program for each layer. store: where weights are sharded. queue: takes the gradients
        of experts that ranks share out."""
        refuse_watched(decoder)
        self.span, self.decoder, self.groups = span, decoder, groups
        self.placer, self.share, self.store = placer, ops.share, store
        self.layerwise, self.queue = layerwise or store is not None or "ep" in groups, queue
        self._batch = Packed.of([2, 3])
        with torch.enable_grad():
            self.layers = compiled_layers(
                decoder, ops, self._batch, None, dtype, compiler, False, span.layers, None if span.first else True,
                span.deferring,
            )  # fmt: skip
            top = self.layers[-1]
            self.wanted = top.wanted or bool(top.trained)
            self.embedding = compiler.compile(embedding_stage(decoder, ops, dtype)) if span.first else None
            self.loss = compiler.compile(loss_stage(decoder, ops, dtype, z_loss, self.wanted)) if span.last else None
        ends = [halves for halves in (self.embedding, self.loss) if halves is not None]
        stream = Place("x", "float32", ((self.share.own_rows(0), self.share.step), (decoder.config.hidden_size, 0)))
        self.memory = plan_group(span, self.layers, ends, self.wanted, stream, placer)
        self._pool = Pool() if pool is None else pool
        self.programs: dict[str, list[StepProgram]] = {}

    def attach(self, scratch: Tensor) -> None:
        """Build the programs. scratch: at least `memory.scratch` bytes, for all groups that do not run at once."""
        layers: list[Part] = list(range(len(self.layers)))
        kinds: dict[str, tuple[type[StepProgram], list[Part]]] = {
            "forward": (Forward, ["embed", *layers, "head"]), "backward": (Backward, [*reversed(layers), "embed"])
        }  # fmt: skip
        if self.span.deferring:
            kinds["weights"] = Weights, layers[::-1]
        with torch.enable_grad():  # a layer knows by it which of its weights have a gradient
            for name, (kind, parts) in kinds.items():
                made = [kind(self, scratch, some) for some in ([[p] for p in parts] if self.layerwise else [parts])]
                self.programs[name] = [one for one in made if len(one.program)]

    def forward(
        self, tokens: Tensor, batch: Packed, x: Tensor | None, loss: tuple[Tensor, Tensor] | None, give: Give
    ) -> tuple[Flight, Tensor | None]:
        """x: the stream [T, D] (own rows) from the group before. loss: targets and token weights, for the last group.
        Returns the stream for the next group too."""
        width, count = self.decoder.config.hidden_size, len(tokens)
        units = self.share.units_of(count)
        tables = self.decoder.rope_tables(batch)
        flight = Flight(units, {"tokens": tokens.to(torch.int64).contiguous(), "kept": self._take("kept")})
        flight.tensors |= {f"batch{i}": tensor for i, tensor in enumerate(tensors_of(batch))}
        flight.tensors |= {f"table{i}": tensor for i, tensor in enumerate(tables)}
        extra: dict[str, Tensor] = {}
        if x is not None:
            flight.tensors["x"] = x.contiguous()
        if loss is None:
            extra["y"] = torch.empty(self.share.own_rows(units), width)
        else:
            flight.objective, flight.logprobs = torch.empty(()), torch.empty(count)
            extra = {"targets": loss[0].to(torch.int64).contiguous(), "token_weights": loss[1]}
            extra |= {"objective": flight.objective, "logprobs": flight.logprobs}
        flight.early = self._run("forward", flight, extra, give)
        return flight, extra.get("y")

    def backward(self, flight: Flight, slope: Tensor | None, give: Give) -> tuple[Tensor | None, Gradients]:
        """slope: the gradient of the stream that was returned. That of x, and the gradients that are there by now."""
        extra = {} if slope is None else {"slope": slope.contiguous()}
        if "x" in flight.tensors:
            extra["dx"] = torch.empty_like(flight.tensors["x"])
        if self.span.deferring:
            flight.tensors["later"] = self._take("later")
        found, early = self._run("backward", flight, extra, give), flight.early
        flight.early = {}
        for name in early.keys() & found.keys():  # one weight that embeds and is the head
            found[name] = early[name].add_(found[name])
        if not self.span.deferring:
            self._give_back(flight)
        return extra.get("dx"), early | found

    def weights(self, flight: Flight, give: Give) -> Gradients:
        """The gradients that were put off."""
        if not self.span.deferring:
            return {}
        found = self._run("weights", flight, {}, give)
        self._give_back(flight)
        return found

    def _run(self, kind: str, flight: Flight, extra: Mapping[str, Tensor], give: Give) -> Gradients:
        """The programs of a kind of step, in their order. While one runs, the next one's weights are gathered."""
        found: Gradients = {}
        programs, store = self.programs[kind], self.store
        for program, after in zip_longest(programs, programs[1:]):
            if store is None:
                made = program.run(flight, extra)
            else:
                with store.held(program.units):
                    for unit in [] if after is None else after.units:
                        store.begin(unit)
                    made = program.run(flight, extra)
            found |= give(made)
        return found

    def _take(self, kind: str) -> Tensor:
        return self._pool.take(kind, self.memory.kept if kind == "kept" else self.memory.later)

    def _give_back(self, flight: Flight) -> None:
        for kind in ("kept", "later"):
            if kind in flight.tensors:
                self._pool.give_back(kind, flight.tensors.pop(kind))


class Pool:
    """Memory of micro-batches that are not in flight any more, by kind."""

    def __init__(self) -> None:
        self.free: dict[str, list[Tensor]] = {"kept": [], "later": []}

    def take(self, kind: str, size: int) -> Tensor:
        """Memory of at least so many bytes; a piece that is too small goes."""
        found = self.free[kind].pop() if self.free[kind] else torch.empty(0)
        return found if found.nbytes >= size else torch.empty(size, dtype=torch.uint8)

    def give_back(self, kind: str, memory: Tensor) -> None:
        self.free[kind].append(memory)
