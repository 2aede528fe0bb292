"""The memory of a stitched program: what lies where, and from which call to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.compile.program import ALIGN, Placed
from lockstep.memory.arena import Arena, Buffer, lower_bound, without_reuse


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

    def summary(self) -> dict[str, int]:
        """Bytes: the plan's size, the most that is alive at once, and the sum without reuse."""
        buffers: Sequence[Buffer] = self.plan()[0]
        return {"planned": self.size, "alive": lower_bound(buffers), "unshared": without_reuse(buffers)}
