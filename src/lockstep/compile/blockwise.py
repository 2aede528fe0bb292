"""Level O1: every block's forward and backward is a program, compiled once for each kind of block.

What is around the blocks (embedding, final norm, loss) runs operator by operator, and autograd joins the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.compile.compiler import Compiler
from lockstep.compile.describe import Unchanged
from lockstep.compile.layers import Layer, compiled_layers
from lockstep.compile.program import ALIGN, Placed, Program, place
from lockstep.compile.recipe import Place
from lockstep.compile.stage import tensors_of
from lockstep.model.decoder import Decoder
from lockstep.model.moe import Routed
from lockstep.ops import Operators, Packed


class Blockwise:
    """A decoder whose blocks run as programs when gradients are recorded. Called as the decoder is."""

    def __init__(self, decoder: Decoder, ops: Operators, dtype: torch.dtype, compiler: Compiler, rows: int) -> None:
        """rows: the most tokens of a batch. Compiles at once; CannotCompile where that is not possible."""
        self.decoder, self.ops, self.dtype, self.compiler, self.rows = decoder, ops, dtype, compiler, rows
        self._compile()

    def __call__(self, tokens: Tensor, batch: Packed, routed: list[Routed] | None = None) -> Tensor:
        """tokens int [T] -> hidden [T, D] after the final norm, with the graph that autograd needs. routed: takes what
        the router of each layer did, where the model has a load-balance loss."""
        decoder = self.decoder
        if len(tokens) > self.rows or not torch.is_grad_enabled():
            return decoder(self.ops, tokens, batch, dtype=self.dtype, routed=routed)
        if not self._unchanged:
            self.compiler.note("the model was changed after it was compiled: compiling again")
            self._compile()
        x = self.ops.embedding(tokens, decoder.embed.weight, self.dtype, decoder.config.embedding_scale).float()
        tables = decoder.rope_tables(batch)
        for layer in self._layers:
            inputs = [*tensors_of(batch), tables[layer.slides], *(leaf.tensor for leaf in layer.leaves)]
            x, *routes = _Block.apply(self._programs[id(layer.halves)], x, *inputs)
            if routed is not None and routes:
                routed.append(Routed(*routes))
        return decoder.norm(self.ops, x, self.dtype)

    def _compile(self) -> None:
        batch = Packed.of([2, 3])
        routed = bool(self.decoder.config.router_aux_loss)
        with torch.enable_grad():
            self._layers = compiled_layers(self.decoder, self.ops, batch, None, self.dtype, self.compiler, routed)
        with self.compiler.phase("build"):
            kinds = {id(layer.halves): layer for layer in self._layers}
            placed = {key: _placed(layer, self.rows) for key, layer in kinds.items()}
            size = max(max(pair[0].scratch, pair[1].scratch) for pair in placed.values())
            scratch = torch.empty(size + ALIGN, dtype=torch.uint8)
            self._programs = {key: _Programs(layer, *placed[key], scratch, self.rows) for key, layer in kinds.items()}
        self._unchanged = Unchanged(self.decoder)


def _placed(layer: Layer, rows: int) -> tuple[Placed, Placed]:
    assert layer.halves.backward is not None
    return place(layer.halves.forward, rows), place(layer.halves.backward, rows)


@dataclass
class _Half:
    """A program with its values: those bound at every call, and the memory of what is saved between the halves."""

    program: Program
    bound: list[int]
    saved: int

    def run(self, rows: int, tensors: list[Tensor], saved: Tensor) -> None:
        self.program.resize(rows)
        self.program.run([*self.bound, self.saved], [*tensors, saved])


class _Programs:
    """The two programs of a kind of block. What the forward saves lies in one piece of memory, made at every call."""

    def __init__(self, layer: Layer, forward: Placed, backward: Placed, scratch: Tensor, rows: int) -> None:
        halves = layer.halves
        self.used, self.tangents = halves.used, halves.tangents
        results = forward.recipe.outputs
        count = len(results) - halves.saved
        kept = results[count:]
        ends = list(accumulate((_up(one.bytes(rows)) for one in kept), initial=0))
        self.saved_bytes, offsets = ends[-1] + ALIGN, ends[:-1]
        self.forward = _half(forward, kept, offsets, len(forward.recipe.inputs) + count, scratch)
        self.backward = _half(backward, kept, offsets, len(halves.used), scratch)
        self.results, self.gradients = results[:count], backward.recipe.outputs
        self.gives = backward.recipe.gives


def _half(placed: Placed, kept: tuple[Place, ...], offsets: list[int], first: int, scratch: Tensor) -> _Half:
    """A program of a recipe whose places from `first` on are the saved ones."""
    program, recipe = Program(scratch.device), placed.recipe
    empty = torch.empty(0, dtype=torch.uint8)
    saved = program.tensor(empty)
    places, bound = [], []
    for i in range(len(recipe.inputs) + len(recipe.outputs)):
        if first <= i < first + len(kept):
            places.append(program.place(saved, offsets[i - first], kept[i - first]))
        else:
            places.append(program.tensor(empty))
            bound.append(places[-1])
    program.append(placed, places, program.tensor(scratch))
    return _Half(program, bound, saved)


class _Block(Function):
    @staticmethod
    def forward(ctx: Any, programs: _Programs, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows = inputs[0].shape[0]
        given = [tensor.detach() for tensor in inputs]
        results = tuple(_fresh(one, rows) for one in programs.results)
        saved = torch.empty(programs.saved_bytes, dtype=torch.uint8)
        programs.forward.run(rows, [*given, *results], saved)
        ctx.programs, ctx.saved = programs, saved
        ctx.save_for_backward(*(inputs[i] for i in programs.used))
        ctx.mark_non_differentiable(*(one for i, one in enumerate(results) if i not in programs.tangents))
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        programs: _Programs = ctx.programs
        rows = incoming[0].shape[0]
        found = [_fresh(one, rows) for one in programs.gradients]
        given = [tensor.detach() for tensor in ctx.saved_tensors]
        slopes = [incoming[i].contiguous() for i in programs.tangents]
        programs.backward.run(rows, [*given, *slopes, *found], ctx.saved)
        rest = iter(programs.gives)
        wanted = (next(rest) if needed else None for needed in ctx.needs_input_grad[1:])
        return None, *(None if at is None else found[at] for at in wanted)


def _fresh(place: Place, rows: int) -> Tensor:
    sizes = [constant + slope * rows for constant, slope in place.sizes]
    return torch.empty(sizes, dtype=getattr(torch, place.dtype))


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
