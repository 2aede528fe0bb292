"""Where a group's programs have what they share: in the memory of a micro-batch in flight, or in the scratch area."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.compile.halves import Halves
from lockstep.compile.layers import Layer
from lockstep.compile.memory_map import MemoryMap
from lockstep.compile.program import ALIGN, Placer
from lockstep.compile.recipe import Place, Recipe


@dataclass(frozen=True)
class Span:
    """What a group is: its layers, whether it embeds (first) and has the head (last), which layers run again in the
    backward pass instead of keeping what that reads, and whether gradients of weights are put off (deferring)."""

    layers: range
    first: bool
    last: bool
    again: frozenset[int] = frozenset()
    deferring: bool = False


@dataclass(frozen=True)
class Area:
    """A place in some memory, by its name; without a place the memory is a tensor that is given at every run."""

    memory: str
    offset: int = 0
    place: Place | None = None


@dataclass(frozen=True)
class GroupMemory:
    """streams[i], slopes[i]: the input of layer i and its gradient (the last: the stream after all layers). saved[i]:
    what layer i's backward pass reads; saved_ahead[i]: where the forward pass puts it, which is elsewhere if the layer
    runs again. carried[i]: what its weights' gradients read of the backward pass. unread: a stream that nobody reads.

    scratch: bytes of the area that all groups share. kept, later: of a micro-batch's two memories (`group`).
    """

    streams: tuple[Area, ...]
    slopes: tuple[Area, ...]
    saved: tuple[tuple[Area, ...], ...]
    saved_ahead: tuple[tuple[Area, ...], ...]
    carried: tuple[tuple[Area, ...], ...]
    unread: Area
    scratch: int
    kept: int
    later: int


def plan_group(
    span: Span, layers: Sequence[Layer], ends: Sequence[Halves], wanted: bool, stream: Place, placer: Placer
) -> GroupMemory:
    """The plan for up to as many rows as the placer has. ends: the embedding and the loss, where the group has them.
    wanted: whether the loss has a gradient of its input. stream: between layers."""
    rows, count = placer.rows, len(layers)
    maps = {"kept": MemoryMap(), "later": MemoryMap(), "scratch": MemoryMap()}
    halves = [*(layer.halves for layer in layers), *ends]
    recipes = [r for h in halves for r in (h.forward, h.backward, h.weights) if r is not None]
    maps["scratch"].take(max(placer(recipe).scratch for recipe in recipes))

    def area(memory: str, place: Place) -> Area:
        return Area(memory, maps[memory].take(place.bytes(rows)), place)

    turns = [area("scratch", stream) for _ in range(2)]
    first = area("kept", stream) if span.first else Area("x")
    streams = [first, *(area("kept", stream) for _ in range(count - 1))]
    streams.append(area("kept", stream) if span.last else Area("y"))
    slopes = [turns[0] if span.first else Area("dx"), *(turns[i % 2] for i in range(1, count))]
    slopes.append(area("kept", stream) if span.last and wanted else Area("slope"))
    unread = area("scratch", stream)
    saved, ahead = _saved(span, layers, maps["scratch"], area)
    carried = [tuple(area("later", one) for one in _last(h.backward, h.carried)) for h in halves[:count]]
    return GroupMemory(
        tuple(streams), tuple(slopes), saved, ahead, tuple(carried), unread,
        maps["scratch"].size + ALIGN, maps["kept"].size + ALIGN, maps["later"].size + ALIGN,
    )  # fmt: skip


Areas = tuple[tuple[Area, ...], ...]


def _saved(
    span: Span, layers: Sequence[Layer], scratch: MemoryMap, area: Callable[[str, Place], Area]
) -> tuple[Areas, Areas]:
    """Where the backward pass reads what a layer saved, and where the forward pass puts it."""
    saved: list[tuple[Area, ...]] = []
    ahead: list[tuple[Area, ...]] = []
    begin = end = scratch.size
    for layer, number in zip(layers, span.layers, strict=True):
        places = _last(layer.halves.forward, layer.halves.saved)
        if number not in span.again:
            saved.append(tuple(area("kept", one) for one in places))
            ahead.append(saved[-1])
            continue
        scratch.size = begin  # layers that run again do so one after the other, in one place
        ahead.append(tuple(area("scratch", one) for one in places))
        end = max(end, scratch.size)
        saved.append(tuple(area("later", one) for one in places) if span.deferring else ahead[-1])
    scratch.size = end
    return tuple(saved), tuple(ahead)


def _last(recipe: Recipe | None, count: int) -> tuple[Place, ...]:
    return () if recipe is None else recipe.outputs[len(recipe.outputs) - count :]
