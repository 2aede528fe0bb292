"""The compiled loops of the micro-kernel, read from the machine code of a build that this processor need not run.

    python -m tests.ops.inner_loops avx512-bf16 znver4 sapphirerapids
    python -m tests.ops.inner_loops amx-bf16

prints of every such loop its multiply-adds, its loads, what of it lies on the stack and the cycles of a turn that
llvm-mca predicts (Debian: apt install llvm-19; the model's numbers, nothing measured, and none of tile instructions).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MULTIPLY_ADD = re.compile(r"v(dpbf16ps|fmadd\d+ps)\s.*%[yz]mm|tdpbf16ps\s")
VECTOR_ON_STACK = re.compile(r"\(%r[sb]p.*%[yz]mm|%[yz]mm.*\(%r[sb]p")


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its function and its instructions, in AT&T's order."""

    function: str
    instructions: tuple[str, ...]

    @property
    def multiply_adds(self) -> int:
        return sum(bool(MULTIPLY_ADD.match(line)) for line in self.instructions)

    @property
    def loads(self) -> int:
        return sum("(%" in line and not line.startswith(("lea", "prefetch", "nop")) for line in self.instructions)

    @property
    def tile_loads(self) -> int:
        return sum(line.startswith("tileloadd") for line in self.instructions)

    @property
    def on_stack(self) -> int:
        """Vectors that a turn reads from or writes to the stack."""
        return sum(bool(VECTOR_ON_STACK.search(line)) for line in self.instructions)


def micro_kernel(code: Path) -> list[Loop]:
    """The loops of `tile` (csrc/tile.h) and `dot_tiles` (csrc/tiles.h) in an object or a library, but for those copied
    into their callers."""
    named = ((name, body) for name, body in _functions(machine_code(code)) if re.search(r"::(dot_)?tiles?<", name))
    found = (Loop(name, loop) for name, body in named for loop in _innermost(body))
    return [loop for loop in found if loop.multiply_adds > 0]


def machine_code(code: Path) -> str:
    """As objdump prints it."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cycles(loop: Loop, processor: str) -> float:
    """Of one turn, by llvm-mca's model of the processor."""
    lines = [re.sub(r"^(j\w+)\s.*", r"\1 .L", line) for line in loop.instructions]
    command = ["llvm-mca-19", "-mtriple=x86_64", f"-mcpu={processor}", "-iterations=100"]
    run = subprocess.run(command, input="\n".join([".L:", *lines, ""]), capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", run.stdout)
    assert total is not None
    return int(total[1]) / 100


Line = tuple[int, str]
"""An address, and the instruction there."""


def _functions(text: str) -> Iterator[tuple[str, list[Line]]]:
    for block in text.split("\n\n"):
        head, *lines = block.strip().splitlines() or [""]
        if name := re.match(r"^[0-9a-f]+ <(.*)>:$", head):
            found = (re.match(r"^\s*([0-9a-f]+):\s+(.*)$", line) for line in lines)
            yield name[1], [(int(line[1], 16), line[2].split("#")[0].strip()) for line in found if line]


def _innermost(body: list[Line]) -> Iterator[tuple[str, ...]]:
    at = {address: i for i, (address, _) in enumerate(body)}
    jumps = [(i, re.match(r"^j\w+\s+([0-9a-f]+)\b", text)) for i, (_, text) in enumerate(body)]
    loops = [(at[int(to[1], 16)], i) for i, to in jumps if to and at.get(int(to[1], 16), i + 1) <= i]
    for first, last in loops:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops):
            yield tuple(re.sub(r"\s<.*>", "", text) for _, text in body[first : last + 1])


def main(isa: str, *processors: str) -> None:
    from lockstep.ops import build

    print("multiply-adds  instructions  loads  vectors on stack", *processors, "loop", sep="  ")
    lines = set()
    for loop in micro_kernel(build.library(isa)):
        predicted = "  ".join(f"{cycles(loop, processor):.1f}" for processor in processors)
        name = re.sub(r"^.*?((dot_)?tiles?<.*?>).*$", r"\1", loop.function.replace("lockstep::", ""))
        numbers = (loop.multiply_adds, len(loop.instructions), loop.loads, loop.on_stack)
        lines.add("  ".join([*map(str, numbers), predicted, name]))
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main(*sys.argv[1:])
