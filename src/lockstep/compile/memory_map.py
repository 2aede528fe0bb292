"""The memory of a stitched program: what lies where, and from which call to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.compile.program import ALIGN, Placed
from lockstep.memory.arena import Arena, Buffer, lower_bound, without_reuse

_NEVER = 1 << 62
"""A call after all."""


@dataclass
class MemoryMap:
    """Areas one after the other, and the buffers that were put into them. Sizes at the largest number of rows."""

    size: int = 0
    _buffers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Offset -> size, first and last call, of areas that hold one buffer."""
    _scratch: list[tuple[int, Placed, int, int]] = field(default_factory=list)
    """Offset, recipe, its first call, and the number of rows, of every use of the scratch area."""

    def take(self, size: int) -> int:
        """The offset of a new area."""
        offset, self.size = self.size, self.size + -(-size // ALIGN) * ALIGN
        return offset

    def touch(self, offset: int, size: int, first: int, last: int) -> None:
        """A buffer at this offset is used by these calls."""
        _, begun, ended = self._buffers.get(offset, (size, first, last))
        self._buffers[offset] = size, min(begun, first), max(ended, last)

    def scratch(self, offset: int, placed: Placed, first: int, rows: int) -> None:
        """A recipe with its intermediates at this offset begins at this call."""
        self._scratch.append((offset, placed, first, rows))

    def plan(self) -> tuple[list[Buffer], Arena]:
        """Every buffer, and the plan that gives each its place: for `memory.overlap.check`."""
        buffers = [Buffer(size, first, last, ALIGN) for size, first, last in self._buffers.values()]
        offsets = list(self._buffers)
        for offset, placed, first, rows in self._scratch:
            own = placed.recipe.buffers(rows)
            buffers += [Buffer(b.size, first + b.first, first + b.last, b.align) for b in own]
            offsets += [offset + inner for inner in placed.offsets]
        return buffers, Arena(tuple(offsets), self.size)

    def beneath(self, blocks: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
        """Offsets for blocks of so many bytes that are used from some call on to the end: where what lies there is not
        needed any more, otherwise behind all areas. Also the end of what is behind them."""
        held = [(offset, offset + size, last) for offset, (size, _, last) in self._buffers.items()]
        held += {(offset, offset + placed.scratch, _NEVER) for offset, placed, _, _ in self._scratch}
        held.sort()
        found, taken, end = dict[int, int](), list[tuple[int, int]](), self.size
        for number, (size, first) in sorted(enumerate(blocks), key=lambda one: one[1][1]):
            alive = [(begin, stop) for begin, stop, last in held if last >= first]
            at = _gap(sorted([*alive, *taken]), size, self.size)
            if at is None:
                at, end = end, end + -(-size // ALIGN) * ALIGN
            else:
                taken.append((at, at + size))
            found[number] = at
        return [found[number] for number in range(len(blocks))], end

    def summary(self) -> dict[str, int]:
        """Bytes: the plan's size, the most that is alive at once, and the sum without reuse."""
        buffers: Sequence[Buffer] = self.plan()[0]
        return {"planned": self.size, "alive": lower_bound(buffers), "unshared": without_reuse(buffers)}


def _gap(taken: Sequence[tuple[int, int]], size: int, end: int) -> int | None:
    """The first aligned offset below `end` with room for so many bytes between intervals that are sorted."""
    at = 0
    for begin, stop in taken:
        if at + size <= begin:
            return at
        at = max(at, -(-stop // ALIGN) * ALIGN)
    return at if at + size <= end else None
