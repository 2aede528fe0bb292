"""Level O1: blocks as programs, compiled once for each kind of block.

A block's forward is one program, its backward another; where a schedule puts the gradients of weights off, they are a
third, which goes into the queue that deferred products go into. Autograd joins the blocks, as at O0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lockstep.compile.compiler import Compiler
from lockstep.compile.describe import refuse_watched
from lockstep.compile.halves import Halves
from lockstep.compile.layers import Layer, compiled_layers
from lockstep.compile.program import ALIGN, Placer, Program
from lockstep.compile.recipe import Place, Recipe
from lockstep.compile.stage import Leaf, tensors_of
from lockstep.model.decoder import BlockCall, Decoder
from lockstep.model.moe import Routed
from lockstep.ops import Operators, Packed
from lockstep.ops.cut_linear import WeightQueue, WholeGradient
from lockstep.ops.spread_experts import Kept
from lockstep.parallel.nodes import Group


class BlockCalls:
    """A `BlockCall`. plain: calls blocks operator by operator: without gradients, and batches of more tokens than the
    placer's rows (units of them, where the operators share rows among ranks; and of fewer than one unit).

    layers: the groups of layers that are here; the first group of the model embeds. again: layers that keep only their
    input and run again in the backward pass. queue: takes gradients of weights; None: they come with the backward pass.
    groups: the ranks that the operators reach, by axis. routed: what routers did is a result too. of_experts: takes the
    gradients of experts that ranks share out.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Operators,
        dtype: torch.dtype,
        layers: Sequence[range],
        again: Collection[int],
        queue: WeightQueue | None,
        compiler: Compiler,
        placer: Placer,
        groups: Mapping[str, Group],
        plain: BlockCall,
        routed: bool = False,
        of_experts: WeightQueue | None = None,
    ) -> None:
        """Compiles at once; CannotCompile where that is not possible."""
        refuse_watched(decoder)
        self.experts = None if of_experts is None else _Experts(groups["ep"], of_experts)
        self.rows, self.again, self.queue, self.plain = placer.rows, frozenset(again), queue, plain
        self.share = ops.share
        self.layers: dict[int, Layer] = {}
        with torch.enable_grad():
            for span in layers:
                wanted = None if span.start == 0 else True
                how = (decoder, ops, Packed.of([2, 3]), None, dtype, compiler, routed, span, wanted, queue is not None)
                self.layers |= dict(zip(span, compiled_layers(*how), strict=True))
            self.trained = {number: layer.trained for number, layer in self.layers.items()}
        with compiler.phase("build"):
            kinds = {id(layer.halves): layer.halves for layer in self.layers.values()}
            recipes = [r for h in kinds.values() for r in (h.forward, h.backward, h.weights) if r is not None]
            scratch = torch.empty(max(placer(r).scratch for r in recipes) + ALIGN, dtype=torch.uint8)
            self.kinds = {key: _Kind(halves, placer, scratch, groups) for key, halves in kinds.items()}

    def __call__(
        self,
        layer: int,
        block: nn.Module,
        ops: Operators,
        x: Tensor,
        batch: Packed,
        table: Tensor,
        pages: None,
        dtype: torch.dtype,
        routed: list[Routed] | None = None,
    ) -> Tensor:
        units = self.share.units(len(x))
        if not 1 <= units <= self.rows or not torch.is_grad_enabled():
            return self.plain(layer, block, ops, x, batch, table, pages, dtype, routed)
        here = self.layers[layer]
        inputs = [*tensors_of(batch), table, *(leaf.tensor for leaf in here.leaves)]
        kind, again = self.kinds[id(here.halves)], layer in self.again
        how = _How(kind, here, self.trained[layer], again, self.queue, units, self.experts)
        y, *routes = _Block.apply(how, x, *inputs)
        if routed is not None and routes:
            routed.append(Routed(*routes))
        stream: Tensor = y
        return stream


class _Kind:
    """The programs of a kind of block. saved: from forward to backward; carried: from backward to weights."""

    def __init__(self, halves: Halves, placer: Placer, scratch: Tensor, groups: Mapping[str, Group]) -> None:
        ahead = halves.forward
        self.used, self.tangents = halves.used, halves.tangents
        self.saved = _Pieces(ahead.outputs[len(ahead.outputs) - halves.saved :], placer.rows)
        gives = () if halves.backward is None else halves.backward.outputs
        self.carried = _Pieces(gives[len(gives) - halves.carried :], placer.rows)
        self.results = ahead.outputs[: len(ahead.outputs) - halves.saved]
        self.gradients = gives[: len(gives) - halves.carried]

        def part(recipe: Recipe | None, *kept: tuple[int, _Pieces]) -> _Part | None:
            return None if recipe is None else _Part(recipe, dict(kept), placer, scratch, groups)

        used, tangents = len(halves.used), len(halves.tangents)
        behind = used + halves.saved + tangents
        self.forward = part(ahead, (len(ahead.inputs) + len(self.results), self.saved))
        self.backward = part(halves.backward, (used, self.saved), (behind + len(self.gradients), self.carried))
        self.weights = part(halves.weights, (used, self.saved), (used + halves.saved, self.carried))
        self.late = frozenset[int]() if halves.weights is None else halves.weights.read
        """Of the used inputs, those that weights' gradients read."""


class _Pieces:
    """Tensors that lie one after the other in memory which is made anew for every call."""

    def __init__(self, places: Sequence[Place], rows: int) -> None:
        ends = list(accumulate((-(-one.bytes(rows) // ALIGN) * ALIGN for one in places), initial=0))
        self.places, self.offsets, self.size = tuple(places), ends[:-1], ends[-1] + ALIGN

    def memory(self) -> Tensor:
        return torch.empty(self.size, dtype=torch.uint8)


class _Part:
    """A program of a recipe. kept: by the first of its places, those that lie in some memory of pieces."""

    def __init__(
        self, recipe: Recipe, kept: Mapping[int, _Pieces], placer: Placer, scratch: Tensor, groups: Mapping[str, Group]
    ) -> None:
        self.program, empty = Program(groups=groups), torch.empty(0)
        self.memories: list[int] = []
        self.bound: list[int] = []
        self.recipe = recipe
        places: list[int] = []
        while len(places) < len(recipe.inputs) + len(recipe.outputs):
            pieces = kept.get(len(places))
            if pieces is not None and pieces.places:
                memory = self.program.tensor(empty)
                self.memories.append(memory)
                both = zip(pieces.offsets, pieces.places, strict=True)
                places += [self.program.place(memory, offset, place) for offset, place in both]
            else:
                places.append(self.program.tensor(empty))
                self.bound.append(places[-1])
        self.program.append(placer(recipe), places, self.program.tensor(scratch))

    def run(self, rows: int, tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
        """tensors: its places in order, those in memories left out."""
        self.program.resize(rows)
        self.program.run([*self.bound, *self.memories], [*tensors, *memories])


@dataclass(frozen=True)
class _Experts:
    """Ranks that share experts out, and who takes the gradients of those here."""

    group: Group
    queue: WeightQueue


class _How:
    """How one block of a kind is called. trained: which of the layer's leaves have a gradient. rows: the size."""

    def __init__(
        self, kind: _Kind, layer: Layer, trained: list[int], again: bool, queue: WeightQueue | None, rows: int,
        experts: _Experts | None,
    ) -> None:  # fmt: skip
        self.kind, self.layer, self.trained, self.again, self.queue = kind, layer, trained, again, queue
        self.rows, self.experts = rows, experts

    def bring(self, kept: Kept | None) -> None:
        """What the layer's experts kept, for the program that runs next."""
        if self.experts is not None:
            self.experts.group.kept = kept

    def take_kept(self) -> Kept | None:
        """What the layer's experts keep for later; gradients that they put off go into their queue."""
        if self.experts is None:
            return None
        group = self.experts.group
        kept, group.kept = group.kept, None
        self.layer.put_late(group, self.experts.queue)
        return kept

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The results, the stream first, and the memory of what is saved (of no tensors: none)."""
        kind, rows = self.kind, self.rows
        assert kind.forward is not None
        results = _fresh(kind.results, rows)
        saved = [kind.saved.memory()] if kind.saved.places else []
        kind.forward.run(rows, [*inputs, *results], saved)
        return results, saved


class _Block(Function):
    @staticmethod
    def forward(ctx: Any, how: _How, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = [tensor.detach() for tensor in inputs]
        results, saved = how.forward(given)
        ctx.how, kept, used = how, how.take_kept(), [inputs[i] for i in how.kind.used]
        ctx.way = None if kept is None or how.again else kept.way
        ctx.save_for_backward(*(inputs if how.again else (*used, *saved, *(() if kept is None else kept.tensors))))
        ctx.mark_non_differentiable(*(one for i, one in enumerate(results) if i not in how.kind.tangents))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        kind, layer, rows = how.kind, how.layer, how.rows
        given, saved = [tensor.detach() for tensor in ctx.saved_tensors], []
        if not how.again:
            given, saved = given[: len(kind.used)], given[len(kind.used) :]
            if ctx.way is not None:
                count = len(saved) - len(Kept._fields) + len(ctx.way)
                how.bring(Kept(*ctx.way, *saved[count:]))
                saved = saved[:count]
        else:
            saved = how.forward(given)[1]
            given = [given[i] for i in kind.used]
        assert kind.backward is not None
        found = _fresh(kind.gradients, rows)
        carried = [kind.carried.memory()] if kind.carried.places else []
        slopes = [incoming[i].contiguous() for i in kind.tangents]
        kind.backward.run(rows, [*given, *slopes, *found], [*saved, *carried])
        kept = how.take_kept()
        given_now = kind.backward.recipe.gives[: len(kind.backward.recipe.gives) - len(kind.carried.places)]
        gives = [None if at is None else found[at] for at in given_now]
        slope = gives.pop(0) if layer.wanted else None
        weights: list[Tensor | None] = [None] * len(layer.leaves)
        if how.queue is None:
            for i, gradient in zip(how.trained, gives, strict=True):
                weights[i] = gradient
        else:
            given = [tensor if i in kind.late else tensor.new_empty(0) for i, tensor in enumerate(given)]
            _Later(how, given, [*saved, *carried], kept).put_into(how.queue, [layer.leaves[i] for i in how.trained])
        others = len(ctx.needs_input_grad) - 2 - len(weights)
        return None, slope, *[None] * others, *weights


class _Later:
    """The gradients of a block's weights: computed together, when the first of them is asked for."""

    def __init__(self, how: _How, given: list[Tensor], memories: list[Tensor], kept: Kept | None) -> None:
        self.how, self.kind, self.given, self.memories, self.kept = how, how.kind, given, memories, kept
        self.found: list[Tensor] = []

    def put_into(self, queue: WeightQueue, weights: Sequence[Leaf]) -> None:
        assert self.kind.weights is not None
        for weight, at in zip(weights, self.kind.weights.recipe.gives, strict=True):
            if at is not None:
                queue.put(weight.tensor, WholeGradient(partial(self._gradient, at)))

    def _gradient(self, at: int) -> Tensor:
        weights = self.kind.weights
        assert weights is not None
        if not self.found:
            self.found = _fresh(weights.recipe.outputs, self.how.rows)
            self.how.bring(self.kept)
            weights.run(self.how.rows, [*self.given, *self.found], self.memories)
            self.how.take_kept()
            self.given, self.memories = [], []
        return self.found[at]


def _fresh(places: Sequence[Place], rows: int) -> list[Tensor]:
    """Tensors for results; their values mean nothing yet."""
    return [
        torch.empty([constant + slope * rows for constant, slope in one.sizes], dtype=getattr(torch, one.dtype))
        for one in places
    ]
