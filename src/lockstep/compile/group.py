"""Level O2 of a pipeline: a group of layers as programs, one for each kind of step of a schedule table.

    forward           embedding (the first group), blocks, loss with its gradient (the last)
    backward          the blocks in reverse: the gradient of the group's input, and those of the weights
    weights           where a table puts those off, a program of their own

Several micro-batches are in flight. What one keeps from its forward to its backward pass lies in one piece of memory,
its `kept`; what weights' gradients need beyond that in another, its `later`. Both come from a pool, so that a step
allocates as many as are ever in flight, once. Intermediates of all groups of a rank share one scratch area.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.compile.compiler import Compiler
from lockstep.compile.describe import refuse_watched
from lockstep.compile.group_memory import Area, Span, plan_group
from lockstep.compile.halves import Halves
from lockstep.compile.layers import compiled_layers
from lockstep.compile.program import Placer, Program
from lockstep.compile.recipe import Recipe
from lockstep.compile.stage import embedding_stage, loss_stage, tensors_of
from lockstep.model.decoder import Decoder
from lockstep.ops import Operators, Packed
from lockstep.parallel.nodes import Group


@dataclass
class Flight:
    """A micro-batch between the steps of a group: the tensors that programs are given, by name. early: gradients that
    the forward pass gave (of the loss's weights)."""

    rows: int
    tensors: dict[str, Tensor]
    early: dict[str, Tensor] = field(default_factory=dict)
    objective: Tensor | None = None
    logprobs: Tensor | None = None


class GroupPrograms:
    """The programs of one group, for micro-batches of up to `rows` tokens. `attach` makes them runnable."""

    def __init__(
        self,
        span: Span,
        decoder: Decoder,
        ops: Operators,
        dtype: torch.dtype,
        z_loss: float,
        trained: Collection[str],
        compiler: Compiler,
        placer: Placer,
        groups: Mapping[str, Group],
    ) -> None:
        """Compiles at once; CannotCompile where that is not possible. trained: the parameters that have a gradient.
        placer: for so many rows, shared by the groups. groups: the ranks that the operators add over, by axis."""
        refuse_watched(decoder)
        self.span, self.decoder, self.trained, self.groups = span, decoder, set(trained), groups
        self.rows, self.placer = placer.rows, placer
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
        self.memory = plan_group(span, self.layers, ends, self.wanted, decoder.config.hidden_size, placer)
        self._pool: dict[str, list[Tensor]] = {"kept": [], "later": []}

    def attach(self, scratch: Tensor) -> None:
        """Build the programs. scratch: at least `memory.scratch` bytes, for all groups that do not run at once."""
        kinds: dict[str, type[_Program]] = {"forward": _Forward, "backward": _Backward}
        if self.span.deferring:
            kinds["weights"] = _Weights
        with torch.enable_grad():  # a layer knows by it which of its weights have a gradient
            self.programs = {name: kind(self, scratch) for name, kind in kinds.items()}

    def forward(
        self, tokens: Tensor, batch: Packed, x: Tensor | None, loss: tuple[Tensor, Tensor] | None
    ) -> tuple[Flight, Tensor | None]:
        """x: the stream [T, D] from the group before. loss: targets and token weights, for the last group. Returns the
        stream for the next group too."""
        width, rows = self.decoder.config.hidden_size, len(tokens)
        tables = self.decoder.rope_tables(batch)
        flight = Flight(rows, {"tokens": tokens.to(torch.int64).contiguous(), "kept": self._take("kept")})
        flight.tensors |= {f"batch{i}": tensor for i, tensor in enumerate(tensors_of(batch))}
        flight.tensors |= {f"table{i}": tensor for i, tensor in enumerate(tables)}
        extra: dict[str, Tensor] = {}
        if x is not None:
            flight.tensors["x"] = x.contiguous()
        if loss is None:
            extra["y"] = torch.empty(rows, width)
        else:
            flight.objective, flight.logprobs = torch.empty(()), torch.empty(rows)
            extra = {"targets": loss[0].to(torch.int64).contiguous(), "token_weights": loss[1]}
            extra |= {"objective": flight.objective, "logprobs": flight.logprobs}
        flight.early = self.programs["forward"].run(flight, extra)
        return flight, extra.get("y")

    def backward(self, flight: Flight, slope: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """slope: the gradient of the stream that was returned. That of x, and the gradients that are there by now."""
        extra = {} if slope is None else {"slope": slope.contiguous()}
        if "x" in flight.tensors:
            extra["dx"] = torch.empty_like(flight.tensors["x"])
        if self.span.deferring:
            flight.tensors["later"] = self._take("later")
        found, early = self.programs["backward"].run(flight, extra), flight.early
        flight.early = {}
        for name in early.keys() & found.keys():  # one weight that embeds and is the head
            found[name] = early[name].add_(found[name])
        if not self.span.deferring:
            self._give_back(flight)
        return extra.get("dx"), early | found

    def weights(self, flight: Flight) -> dict[str, Tensor]:
        """The gradients that were put off."""
        if not self.span.deferring:
            return {}
        found = self.programs["weights"].run(flight, {})
        self._give_back(flight)
        return found

    def _take(self, kind: str) -> Tensor:
        pool = self._pool[kind]
        size = self.memory.kept if kind == "kept" else self.memory.later
        return pool.pop() if pool else torch.empty(size, dtype=torch.uint8)

    def _give_back(self, flight: Flight) -> None:
        for kind, pool in self._pool.items():
            if kind in flight.tensors:
                pool.append(flight.tensors.pop(kind))


class _Program:
    """A program whose outside tensors have names. grads: the gradients that it writes."""

    def __init__(self, made: GroupPrograms, scratch: Tensor) -> None:
        self.made, self.memory = made, made.memory
        self.program = Program(groups=made.groups)
        self.outside: dict[str, int] = {}
        self.grads: dict[str, int] = {}
        self.scratch = self.program.tensor(scratch)
        self.leaves: dict[str, int] = {}
        self.parameters = dict(made.decoder.named_parameters())
        self.emit()

    def emit(self) -> None:
        """Append the recipes."""
        raise NotImplementedError

    def run(self, flight: Flight, extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run for a micro-batch. extra: tensors of this step alone. Returns the gradients of parameters."""
        found = {name: torch.empty_like(self.parameters[name], requires_grad=False) for name in self.grads}
        tensors = {**flight.tensors, **extra}
        self.program.resize(flight.rows)
        self.program.run(
            [*self.outside.values(), *self.grads.values()],
            [*(tensors[name] for name in self.outside), *found.values()],
        )
        return found

    def named(self, name: str) -> int:
        """A tensor that is given at every run."""
        if name not in self.outside:
            self.outside[name] = self.program.tensor(torch.empty(0))
        return self.outside[name]

    def leaf(self, name: str) -> int:
        """A weight, which stays where it is."""
        if name not in self.leaves:
            self.leaves[name] = self.program.tensor(self.parameters[name])
        return self.leaves[name]

    def at(self, area: Area) -> int:
        """A place in `kept`, `later`, the scratch area; or a tensor that is given."""
        if area.place is None:
            return self.named(area.memory)
        memory = self.scratch if area.memory == "scratch" else self.named(area.memory)
        return self.program.place(memory, area.offset, area.place)

    def inputs(self, i: int) -> list[int]:
        """What the recipes of a block take."""
        layer, number = self.made.layers[i], self.made.span.layers[i]
        batch = [self.named(f"batch{k}") for k, _ in enumerate(tensors_of(self.made._batch))]
        weights = [self.leaf(f"layers.{number}.{leaf.name}") for leaf in layer.leaves]
        return [self.at(self.memory.streams[i]), *batch, self.named(f"table{int(layer.slides)}"), *weights]

    def append(self, recipe: Recipe, inputs: Sequence[int], results: Sequence[int | str]) -> None:
        """The calls of a recipe. results: for each its place, or the name of the parameter whose gradient it is."""
        places = list(inputs)
        for at, result in zip(recipe.gives, results, strict=True):
            if at is None:
                continue
            if isinstance(result, str):
                result = self.grads.setdefault(result, self.program.tensor(torch.empty(0)))
            places.append(result)
        self.program.append(self.made.placer(recipe), places, self.scratch)


class _Forward(_Program):
    def emit(self) -> None:
        made, memory = self.made, self.memory
        if made.embedding is not None:
            given = [self.named("tokens"), self.leaf("embed.weight")]
            self.append(made.embedding.forward, given, [self.at(memory.streams[0])])
        for i, layer in enumerate(made.layers):
            results = [self.at(memory.streams[i + 1]), *(self.at(area) for area in memory.saved_ahead[i])]
            self.append(layer.halves.forward, self.inputs(i), results)
        if made.loss is not None:
            self._emit_loss(made.loss)

    def _emit_loss(self, loss: Halves) -> None:
        head = "embed.weight" if self.made.decoder.output is None else "output.weight"
        given = [self.at(self.memory.streams[-1]), *(self.named(name) for name in ("targets", "token_weights"))]
        slope = [self.at(self.memory.slopes[-1])] if self.made.wanted else []
        names = [name for name in ("norm.weight", head) if name in self.made.trained]
        results: list[int | str] = [self.named("objective"), self.named("logprobs"), *slope, *names]
        self.append(loss.forward, [*given, self.leaf("norm.weight"), self.leaf(head)], results)


class _Backward(_Program):
    def emit(self) -> None:
        made, memory = self.made, self.memory
        for i in reversed(range(len(made.layers))):
            halves = made.layers[i].halves
            if halves.backward is None:
                continue
            given = self.inputs(i)
            saved = [self.at(area) for area in memory.saved[i]]
            if made.span.layers[i] in made.span.again:
                self.append(halves.forward, given, [self.at(memory.unread), *saved])
            slope = [self.at(memory.slopes[i])] if made.layers[i].wanted else []
            rest: list[int | str] = [*self.names(i)]
            if made.span.deferring:
                rest = [self.at(area) for area in memory.carried[i]]
            used = [given[at] for at in halves.used]
            self.append(halves.backward, [*used, *saved, self.at(memory.slopes[i + 1])], [*slope, *rest])
        if made.embedding is not None and made.embedding.backward is not None:
            inputs = (self.named("tokens"), self.leaf("embed.weight"))
            used = [inputs[at] for at in made.embedding.used]
            self.append(made.embedding.backward, [*used, self.at(memory.slopes[0])], ["embed.weight"])

    def names(self, i: int) -> list[str]:
        """The weights of a layer whose gradients its recipe gives."""
        layer, number = self.made.layers[i], self.made.span.layers[i]
        return [f"layers.{number}.{layer.leaves[at].name}" for at in layer.trained]


class _Weights(_Backward):
    def emit(self) -> None:
        made, memory = self.made, self.memory
        for i in reversed(range(len(made.layers))):
            halves = made.layers[i].halves
            if halves.weights is None:
                continue
            given = self.inputs(i)
            areas = [*memory.saved[i], *memory.carried[i]]
            used = [given[at] for at in halves.used]
            self.append(halves.weights, [*used, *map(self.at, areas)], self.names(i))
