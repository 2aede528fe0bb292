"""Level O2: the forward and backward pass of a micro-batch as one program over one static memory plan.

The program is stitched from the recipes of its stages, which know nothing of their neighbours:

    embedding -> block 0 .. block L-1 -> loss with its gradient -> block L-1 .. block 0 backward -> embedding backward

with the load-balance loss of experts, where there is one, after the loss: its gradients go to every router's logits.

Memory is one piece. What a block saves for its backward pass has a place of its own, and so has every block's input;
intermediates share one scratch area, since one stage runs at a time. Gradients of the stream alternate between two
places, and those of weights go straight to where the caller keeps them: memory of his own, or, where they are done with
before the next micro-batch, `place_of_gradients`, most of which is what later layers saved and need no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from lockstep.compile.capture import CannotCompile
from lockstep.compile.compiler import Compiler
from lockstep.compile.describe import Unchanged, refuse_watched
from lockstep.compile.halves import Halves
from lockstep.compile.layers import Layer, compiled_layers
from lockstep.compile.memory_map import MemoryMap
from lockstep.compile.program import ALIGN, Placer, Program
from lockstep.compile.recipe import Place, Recipe
from lockstep.compile.stage import balance_stage, embedding_stage, loss_stage, tensors_of
from lockstep.model.decoder import Decoder
from lockstep.ops import Operators, Packed


class MicroBatch:
    """The gradient of one micro-batch of up to `rows` tokens, by one call.

    parameters: those that train, by name; the gradients come in their order.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Operators,
        dtype: torch.dtype,
        parameters: Mapping[str, nn.Parameter],
        z_loss: float,
        compiler: Compiler,
        rows: int,
    ) -> None:
        """Compiles at once; CannotCompile where that is not possible."""
        refuse_watched(decoder)
        named = dict(decoder.named_parameters())  # gradients go by name here, and by object where autograd makes them
        if strange := [name for name, p in named.items() if p.requires_grad and name not in parameters]:
            raise CannotCompile(f"{strange[0]} asks for a gradient, and the run does not train it")
        if moved := [name for name, p in parameters.items() if named.get(name) is not p]:
            raise CannotCompile(f"{moved[0]} is not the parameter any more that the run trains")
        self.decoder, self.rows = decoder, rows
        batch = Packed.of([2, 3])
        with torch.enable_grad():
            layers = compiled_layers(decoder, ops, batch, None, dtype, compiler, bool(decoder.config.router_aux_loss))
            wanted = layers[-1].wanted or bool(layers[-1].trained)
            embedding = compiler.compile(embedding_stage(decoder, ops, dtype))
            loss = compiler.compile(loss_stage(decoder, ops, dtype, z_loss, wanted))
            routers = [_sloped(layer) for layer in layers if layer.routed]
            balance = None
            if routers:
                balance = compiler.compile(balance_stage(ops, dtype, decoder.config.num_experts, routers))
            stages = _Stages(embedding, layers, loss, wanted, balance)
        with compiler.phase("build"):
            self._stitch = _Stitch(decoder, named, stages, list(parameters), rows, batch)
        self.unchanged = Unchanged(decoder)

    def run(
        self,
        tokens: Tensor,
        targets: Tensor,
        batch: Packed,
        token_weights: Tensor,
        gradients: Sequence[Tensor],
        balance: float = 0.0,
    ) -> tuple[float, Tensor]:
        """Write the gradients (float32, overwritten; in the order of the parameters). Returns the objective, and the
        log-probabilities float32 [T], which the next call overwrites. balance: the weight of the load-balance loss."""
        made, tables = self._stitch, self.decoder.rope_tables(batch)
        values = [made.tokens, made.targets, made.weights, made.weight_of_balance, *made.batch, *made.tables]
        rows = [tokens.to(torch.int64).contiguous(), targets.to(torch.int64).contiguous(), token_weights]
        tensors = [*rows, torch.tensor(balance), *tensors_of(batch), *tables]
        made.program.resize(len(tokens))
        made.program.run([*values, *made.gradients.values()], [*tensors, *gradients])
        return float(made.program.value(made.objective)), made.program.value(made.logprobs)

    @cached_property
    def place_of_gradients(self) -> list[Tensor]:
        """Memory for `run` to write gradients to, which the next run overwrites."""
        made, blocks = self._stitch, dict[int, list[str]]()
        for name in made.gradients:  # those of a layer lie together
            blocks.setdefault(made.written.get(name, len(made.program)), []).append(name)
        shapes = {name: p.shape for name, p in self.decoder.named_parameters()}
        sizes = {name: -(-4 * shapes[name].numel() // ALIGN) * ALIGN for name in made.gradients}
        offsets, end = made.map.beneath([(sum(sizes[n] for n in names), call) for call, names in blocks.items()])
        inner, behind = made.program.value(made.memory), torch.empty(end - made.map.size, dtype=torch.uint8)
        found = {}
        for offset, names in zip(offsets, blocks.values(), strict=True):
            memory, at = (inner, offset) if offset < made.map.size else (behind, offset - made.map.size)
            for name in names:
                found[name] = memory[at : at + 4 * shapes[name].numel()].view(torch.float32).view(shapes[name])
                at += sizes[name]
        return [found[name] for name in made.gradients]

    @property
    def program(self) -> Program:
        return self._stitch.program

    @property
    def memory(self) -> MemoryMap:
        return self._stitch.map


@dataclass(frozen=True)
class _Stages:
    """What the program is stitched from. wanted: whether the loss has a gradient of its input. balance: the
    load-balance loss, where the model has one."""

    embedding: Halves
    layers: list[Layer]
    loss: Halves
    wanted: bool
    balance: Halves | None


@dataclass(frozen=True)
class _Memory:
    """A place in the program's memory: its value and where it lies."""

    value: int
    offset: int
    size: int


class _Stitch:
    """Builds the program: values for what comes in, memory for what lies between, calls stage by stage."""

    def __init__(
        self,
        decoder: Decoder,
        named: dict[str, nn.Parameter],
        stages: _Stages,
        trained: list[str],
        rows: int,
        batch: Packed,
    ) -> None:
        self.decoder, self.named, self.stages, self.rows = decoder, named, stages, rows
        self.program, self.map, self.placed = Program(), MemoryMap(), Placer(rows)
        program, empty = self.program, torch.empty(0)
        self.tokens, self.targets, self.weights, self.weight_of_balance = program.tensors([empty] * 4)
        self.batch = program.tensors([empty] * len(tensors_of(batch)))
        self.tables = program.tensors([empty] * 2)
        self.leaves = dict(zip(named, program.tensors(named.values()), strict=True))
        self.gradients = dict(zip(trained, program.tensors([empty] * len(trained)), strict=True))
        self.written: dict[str, int] = {}
        """The parameters whose gradients some recipe gives, and its first call."""
        self._lay_out()
        self._emit()

    def _lay_out(self) -> None:
        """Two places for the stream's gradient and the scratch area, then the inputs and saved tensors of layers."""
        stages, take, rows = self.stages, self.map.take, self.rows
        (self.stream,) = stages.embedding.forward.outputs
        size = self.stream.bytes(rows)
        halves = [stages.embedding, *(layer.halves for layer in stages.layers)]
        ahead = max(self.placed(h.forward).scratch for h in halves)
        behind = [self.placed(h.backward).scratch for h in halves if h.backward is not None]
        behind += [self.placed(h.forward).scratch for h in (stages.loss, stages.balance) if h is not None]
        slopes = [take(size), take(size)]
        self.scratch = take(max(ahead - self.map.size, *behind, 0))
        streams = [take(size) for _ in range(len(stages.layers) + 1)]
        saved = [[take(one.bytes(rows)) for one in _saved(layer.halves)] for layer in stages.layers]
        routed = [[take(one.bytes(rows)) for one in layer.routed] for layer in stages.layers]
        sloped = [take(layer.routed[0].bytes(rows)) if _sloped(layer) else 0 for layer in stages.layers]
        results = [*stages.loss.forward.outputs[:2], *(stages.balance.forward.outputs[:1] if stages.balance else ())]
        ends = [take(one.bytes(rows)) for one in results]
        shared = self._shared()
        other = take(shared.bytes(rows)) if shared else 0
        memory = self.memory = self.program.memory(self.map.size)

        def at(offset: int, place: Place) -> _Memory:
            return _Memory(self.program.place(memory, offset, place), offset, place.bytes(rows))

        self.slopes = [at(o, self.stream) for o in slopes]
        self.streams = [at(o, self.stream) for o in streams]
        self.saved = [
            [at(o, one) for o, one in zip(offsets, _saved(layer.halves), strict=True)]
            for offsets, layer in zip(saved, stages.layers, strict=True)
        ]
        self.routed = [
            [at(o, one) for o, one in zip(offsets, layer.routed, strict=True)]
            for offsets, layer in zip(routed, stages.layers, strict=True)
        ]
        self.sloped = [
            [at(o, layer.routed[0])] if _sloped(layer) else [] for o, layer in zip(sloped, stages.layers, strict=True)
        ]
        self.ends = [at(o, one) for o, one in zip(ends, results, strict=True)]
        self.objective, self.logprobs = self.ends[2 if stages.balance else 0].value, self.ends[1].value
        self.other = at(other, shared) if shared else None

    def _shared(self) -> Place | None:
        """Where the embedding and the head are one trained parameter: the gradient that is added to the head's."""
        backward = self.stages.embedding.backward
        return None if backward is None or self.decoder.output is not None else backward.outputs[0]

    def _emit(self) -> None:
        stages, x = self.stages, self.streams
        self._append(stages.embedding.forward, [self.tokens, self.leaves["embed.weight"]], [x[0]], ahead=True)
        for i, layer in enumerate(stages.layers):
            results = [x[i + 1], *self.routed[i], *self.saved[i]]
            self._append(layer.halves.forward, self._inputs(i), results, ahead=True)
        self._emit_loss()
        if stages.balance is not None:
            inputs: list[_Value] = [self.ends[0], self.weight_of_balance, *chain.from_iterable(self.routed)]
            self._append(stages.balance.forward, inputs, [self.ends[2], *chain.from_iterable(self.sloped)])
        for i in reversed(range(len(stages.layers))):
            self._emit_backward(i)
        self._emit_embedding()
        for name in self.gradients.keys() - self.written.keys():
            self.program.call("aten::zero_", self.gradients[name])

    def _emit_loss(self) -> None:
        head = "embed.weight" if self.decoder.output is None else "output.weight"
        inputs: list[_Value] = [
            self.streams[-1],
            self.targets,
            self.weights,
            self.leaves["norm.weight"],
            self.leaves[head],
        ]
        slope = [self._slope(len(self.stages.layers))] if self.stages.wanted else []
        # A parameter that trains may have been frozen since.
        names = [name for name in ("norm.weight", head) if self.named[name].requires_grad]
        self._append(self.stages.loss.forward, inputs, [*self.ends[:2], *slope, *names])

    def _emit_backward(self, i: int) -> None:
        layer = self.stages.layers[i]
        if layer.halves.backward is None:
            return
        inputs = self._inputs(i)
        given: list[_Value] = [*(inputs[at] for at in layer.halves.used), *self.saved[i], *self._slopes(i)]
        names = [f"layers.{i}.{layer.leaves[at].name}" for at in layer.trained]
        self._append(layer.halves.backward, given, [*([self._slope(i)] if layer.wanted else []), *names])

    def _emit_embedding(self) -> None:
        halves = self.stages.embedding
        if halves.backward is None:
            return
        inputs = (self.tokens, self.leaves["embed.weight"])
        given: list[_Value] = [*(inputs[at] for at in halves.used), self._slope(0)]
        self._append(halves.backward, given, [self.other or "embed.weight"])
        if self.other is not None:
            total, call = self.gradients["embed.weight"], len(self.program)
            self.program.call("aten::add_.Tensor", total, self.other.value, self.program.constant("i1"))
            self.map.touch(self.other.offset, self.other.size, call, call)

    def _inputs(self, layer: int) -> list[_Value]:
        """What a block's recipe takes."""
        block = self.stages.layers[layer]
        weights = [self.leaves[f"layers.{layer}.{leaf.name}"] for leaf in block.leaves]
        return [self.streams[layer], *self.batch, self.tables[block.slides], *weights]

    def _slopes(self, layer: int) -> list[_Memory]:
        """The places of the gradients of a layer's results."""
        return [self._slope(layer + 1), *self.sloped[layer]]

    def _slope(self, layer: int) -> _Memory:
        """The place of the gradient of the input of a layer."""
        return self.slopes[layer % 2]

    def _append(
        self, recipe: Recipe, inputs: Sequence[_Value], results: Sequence[_Value | str], ahead: bool = False
    ) -> None:
        """The calls of a recipe. results: for every result its place, or the name of the parameter whose gradient it
        is. ahead: there is no gradient of the stream yet, so the scratch area begins where those will lie."""
        placed, places = self.placed(recipe), list(inputs)
        for at, result in zip(recipe.gives, results, strict=True):
            if at is None:
                continue
            if isinstance(result, str):
                self.written.setdefault(result, len(self.program))
                result = self.gradients[result]
            places.append(result)
        first, scratch = len(self.program), self.slopes[0].offset if ahead else self.scratch
        values = [one.value if isinstance(one, _Memory) else one for one in places]
        self.program.append(placed, values, self.memory, scratch)
        self.map.scratch(scratch, placed, first, self.rows)
        last = len(self.program) - 1
        for one in places:
            if isinstance(one, _Memory):
                self.map.touch(one.offset, one.size, first, last)


_Value = int | _Memory


def _sloped(layer: Layer) -> bool:
    """Whether the gradient of the router's logits comes in from the load-balance loss."""
    return 1 in layer.halves.tangents


def _saved(halves: Halves) -> tuple[Place, ...]:
    outputs = halves.forward.outputs
    return outputs[len(outputs) - halves.saved :]
