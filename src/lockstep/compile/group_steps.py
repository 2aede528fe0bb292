"""What the programs of a group hold, by kind of step: the recipes of its parts on the memory that the group planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lockstep.compile.group_memory import Area
from lockstep.compile.halves import Halves
from lockstep.compile.program import Program
from lockstep.compile.recipe import Recipe
from lockstep.compile.stage import tensors_of
from lockstep.parallel.shards import unit_of

if TYPE_CHECKING:
    from lockstep.compile.group import GroupPrograms
    from lockstep.ops.spread_experts import Kept
    from lockstep.parallel.nodes import Group

Gradients = dict[str, Tensor]
Part = int | Literal["embed", "head"]
"""What a program runs: a layer by its place in the group, the embedding, or the norm, the head and the loss."""


@dataclass
class Flight:
    """A micro-batch between the steps of a group: the tensors that programs are given, by name. early: gradients that
    the forward pass gave (of the loss's weights). kept: what layers keep whose experts ranks share out. rows: its size
    (units, where ranks share rows)."""

    rows: int
    tensors: dict[str, Tensor]
    early: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[Part, Kept] = field(default_factory=dict)
    objective: Tensor | None = None
    logprobs: Tensor | None = None


class StepProgram:
    """A program whose outside tensors have names. grads: the gradients that it writes. units: what must be open while
    it runs, where weights are sharded."""

    def __init__(self, made: GroupPrograms, scratch: Tensor, parts: Sequence[Part]) -> None:
        self.made, self.memory = made, made.memory
        self.program = Program(groups=made.groups)
        self.outside: dict[str, int] = {}
        self.grads: dict[str, int] = {}
        self.scratch = self.program.tensor(scratch)
        self.leaves: dict[str, int] = {}
        self.sharded: list[str] = []
        self.units: list[str] = []
        self.parameters = dict(made.decoder.named_parameters())
        self.parts = parts
        for part in parts:
            self.emit(part)

    def emit(self, part: Part) -> None:
        """Append the recipes of a part."""
        raise NotImplementedError

    def run(self, flight: Flight, extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run for a micro-batch. extra: tensors of this step alone. Returns the gradients of parameters."""
        found = {name: torch.empty(self.parameters[name].shape) for name in self.grads}
        tensors = {**flight.tensors, **extra, **{name: self.parameters[name].detach() for name in self.sharded}}
        self.program.resize(flight.rows)
        values, given = [*self.outside.values(), *self.grads.values()], [tensors[name] for name in self.outside]
        experts = self.made.groups.get("ep")
        if experts is None:
            self.program.run(values, [*given, *found.values()])
        else:
            self._run_with(experts, flight, values, [*given, *found.values()])
        return found

    def _run_with(self, experts: Group, flight: Flight, values: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Run where ranks share experts out: what they keep belongs to the flight."""
        (part,) = self.parts
        experts.kept = flight.kept.pop(part, None)
        self.program.run(values, tensors)
        kept, experts.kept = experts.kept, None
        if kept is not None and self.keeps(part):
            flight.kept[part] = kept
        if isinstance(part, int) and experts.late:
            assert self.made.queue is not None
            self.made.layers[part].put_late(experts, self.made.queue)

    def keeps(self, part: Part) -> bool:
        """Whether what experts keep is for a program that runs later."""
        return True

    def named(self, name: str) -> int:
        """A tensor that is given at every run."""
        if name not in self.outside:
            self.outside[name] = self.program.tensor(torch.empty(0))
        return self.outside[name]

    def leaf(self, name: str) -> int:
        """A weight, which stays where it is; or is gathered for every run."""
        if name not in self.leaves:
            store = self.made.store
            if store is not None and name in store:
                self.sharded.append(name)
                self.units += [] if unit_of(name) in self.units else [unit_of(name)]
                self.leaves[name] = self.named(name)
            else:
                self.leaves[name] = self.program.tensor(self.parameters[name])
        return self.leaves[name]

    def at(self, area: Area) -> int:
        """A place in `kept`, `later`, the scratch area; or a tensor that is given."""
        if area.place is None:
            return self.named(area.memory)
        memory = self.scratch if area.memory == "scratch" else self.named(area.memory)
        return self.program.place(memory, area.offset, area.place)

    def inputs(self, i: int, recipe: Recipe, which: Sequence[int] | None = None) -> list[int]:
        """What the recipe of a block takes: all inputs of a block, or these. What the recipe does not read is empty."""
        layer, number = self.made.layers[i], self.made.span.layers[i]
        batch = [f"batch{k}" for k, _ in enumerate(tensors_of(self.made._batch))]
        stream, table = self.memory.streams[i], f"table{int(layer.slides)}"
        weights = [f"layers.{number}.{leaf.name}" for leaf in layer.leaves]
        made: list[Callable[[], int]] = [partial(self.at, stream)]
        made += [partial(self.named, name) for name in (*batch, table)]
        made += [partial(self.leaf, name) for name in weights]
        chosen = made if which is None else [made[at] for at in which]
        return [value() if slot in recipe.read else self.nothing for slot, value in enumerate(chosen)]

    @cached_property
    def nothing(self) -> int:
        return self.program.tensor(torch.empty(0))

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


class Forward(StepProgram):
    def keeps(self, part: Part) -> bool:
        return isinstance(part, int) and self.made.span.layers[part] not in self.made.span.again

    def emit(self, part: Part) -> None:
        made, memory = self.made, self.memory
        if part == "embed":
            if made.embedding is not None:
                given = [self.named("tokens"), self.leaf("embed.weight")]
                self.append(made.embedding.forward, given, [self.at(memory.streams[0])])
        elif part != "head":
            recipe = made.layers[part].halves.forward
            results = [self.at(memory.streams[part + 1]), *(self.at(area) for area in memory.saved_ahead[part])]
            self.append(recipe, self.inputs(part, recipe), results)
        elif made.loss is not None:
            self._emit_loss(made.loss)

    def _emit_loss(self, loss: Halves) -> None:
        head = "embed.weight" if self.made.decoder.output is None else "output.weight"
        given = [self.at(self.memory.streams[-1]), *(self.named(name) for name in ("targets", "token_weights"))]
        slope = [self.at(self.memory.slopes[-1])] if self.made.wanted else []
        # A parameter that trains may have been frozen since.
        names = [name for name in ("norm.weight", head) if self.parameters[name].requires_grad]
        results: list[int | str] = [self.named("objective"), self.named("logprobs"), *slope, *names]
        self.append(loss.forward, [*given, self.leaf("norm.weight"), self.leaf(head)], results)


class Backward(StepProgram):
    def emit(self, part: Part) -> None:
        if part == "embed":
            self._emit_embedding()
        elif part != "head":
            self._emit_layer(part)

    def _emit_layer(self, i: int) -> None:
        made, memory = self.made, self.memory
        halves = made.layers[i].halves
        if halves.backward is None:
            return
        saved = [self.at(area) for area in memory.saved[i]]
        if made.span.layers[i] in made.span.again:
            self.append(halves.forward, self.inputs(i, halves.forward), [self.at(memory.unread), *saved])
        slope = [self.at(memory.slopes[i])] if made.layers[i].wanted else []
        rest: list[int | str] = [*self.names(i)]
        if made.span.deferring:
            rest = [self.at(area) for area in memory.carried[i]]
        used = self.inputs(i, halves.backward, halves.used)
        self.append(halves.backward, [*used, *saved, self.at(memory.slopes[i + 1])], [*slope, *rest])

    def _emit_embedding(self) -> None:
        halves = self.made.embedding
        if halves is None or halves.backward is None:
            return
        inputs = (partial(self.named, "tokens"), partial(self.leaf, "embed.weight"))
        used = [inputs[at]() if i in halves.backward.read else self.nothing for i, at in enumerate(halves.used)]
        self.append(halves.backward, [*used, self.at(self.memory.slopes[0])], ["embed.weight"])

    def names(self, i: int) -> list[str]:
        """The weights of a layer whose gradients its recipe gives."""
        layer, number = self.made.layers[i], self.made.span.layers[i]
        return [f"layers.{number}.{layer.leaves[at].name}" for at in layer.trained]


class Weights(Backward):
    def _emit_layer(self, i: int) -> None:
        halves, memory = self.made.layers[i].halves, self.memory
        if halves.weights is None:
            return
        areas = [*memory.saved[i], *memory.carried[i]]
        used = self.inputs(i, halves.weights, halves.used)
        self.append(halves.weights, [*used, *map(self.at, areas)], self.names(i))
