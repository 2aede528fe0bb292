"""Parameters cut into runs of elements, spread evenly over the data-parallel ranks.

A run is a piece of a tensor's segment that begins at a multiple of the block of a sum of squares, so that the norm of a
gradient is the same number whoever sums which run. A tensor has one segment, or those that tensor parallelism cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.ops.tree import SQUARE_BLOCK
from lockstep.parallel.collectives import Axis


class Run(NamedTuple):
    """Elements ``start .. stop`` of a segment of a parameter, in the segment's own row order. owner: a rank."""

    name: str
    segment: int
    start: int
    stop: int
    owner: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Cut(NamedTuple):
    """Along which dimension a tensor is cut into how many segments; dim is None for one segment, the tensor."""

    dim: int | None = None
    segment_count: int = 1

    def segments(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of the segments."""
        return (tensor,) if self.dim is None else tensor.tensor_split(self.segment_count, dim=self.dim)

    def runs(self, tensor: Tensor, ranks: int) -> list[Tensor]:
        """Views of as many neighbouring segments for each of the ranks."""
        assert self.dim is not None
        sizes, each = [part.shape[self.dim] for part in self.segments(tensor)], self.segment_count // ranks
        return list(tensor.split([sum(sizes[i : i + each]) for i in range(0, self.segment_count, each)], dim=self.dim))


def unit_of(name: str) -> str:
    """What a parameter is gathered and reduced with, by its whole-model name, where weights or gradients are sharded:
    its layer (``layers.3``), the embedding (``embed``), or the rest (``head``)."""
    if name.startswith("layers."):
        return ".".join(name.split(".", 2)[:2])
    return "embed" if name.startswith("embed.") else "head"


def spread_runs(tensors: Mapping[str, Tensor], cuts: Mapping[str, Cut], ranks: int, first: int = 0) -> list[Run]:
    """The runs of these parameters in their order, owners rising from ``first`` on (and around), each rank's share
    equal up to a block."""
    sizes = [(n, i, s.numel()) for n, t in tensors.items() for i, s in enumerate(cuts[n].segments(t))]
    total, before, found = sum(size for _, _, size in sizes), 0, list[Run]()
    for name, segment, size in sizes:
        for start in range(0, size, SQUARE_BLOCK):
            stop = min(start + SQUARE_BLOCK, size)
            owner = (first + min((before + (stop - start) // 2) * ranks // total, ranks - 1)) % ranks
            before += stop - start
            if found and found[-1][:2] == (name, segment) and found[-1].owner == owner:
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(Run(name, segment, start, stop, owner))
    return found


class Shards:
    """Runs of a set of tensors of the same names and shapes: how parts are read, written and collected."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        cuts: Mapping[str, Cut],
        axis: Axis,
        by_unit: bool = False,
        apart: Mapping[str, Axis] | None = None,
    ) -> None:
        """by_unit: every unit is spread over all ranks, not only the whole, so that they share each layer's traffic;
        units smaller than a block go around. apart: parameters that other ranks share than those of ``axis``."""
        self.axis, self.apart, self.cuts, self.runs = axis, dict(apart or {}), dict(cuts), list[Run]()
        groups: dict[tuple[str, str], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            unit = unit_of(name) if by_unit else ""
            groups.setdefault((self.axis_of(name).name, unit), {})[name] = tensor
        for number, group in enumerate(groups.values()):
            size = self.axis_of(next(iter(group))).size
            self.runs += spread_runs(group, cuts, size, number % size)
        self._choose()

    def axis_of(self, name: str) -> Axis:
        """The ranks that share out a parameter."""
        return self.apart.get(name, self.axis)

    @property
    def shared(self) -> bool:
        """Whether anything is another rank's."""
        return any(self.axis_of(run.name).size > 1 for run in self.runs)

    def part(self, names: Iterable[str]) -> Shards:
        """The runs of some of the parameters."""
        chosen, found = set(names), Shards({}, self.cuts, self.axis, apart=self.apart)
        found.runs = [run for run in self.runs if run.name in chosen]
        found._choose()
        return found

    def by_axis(self) -> list[Shards]:
        """The runs in parts that are each shared out over one axis, which is the part's ``axis``."""
        found = []
        for axis in dict.fromkeys(self.axis_of(run.name) for run in self.runs):
            part = Shards({}, self.cuts, axis)
            part.runs = [run for run in self.runs if self.axis_of(run.name) is axis]
            part._choose()
            found.append(part)
        return found

    @property
    def names(self) -> list[str]:
        """The parameters, in their order."""
        return list(dict.fromkeys(run.name for run in self.runs))

    def of(self, owner: int) -> list[Run]:
        return [run for run in self.runs if run.owner == owner]

    def read(self, tensors: Mapping[str, Tensor], run: Run) -> Tensor:
        """The run's elements [n]: a view where the segment is contiguous, otherwise a copy."""
        return self._segment(tensors, run).reshape(-1)[run.start : run.stop]

    def write(self, tensors: Mapping[str, Tensor], run: Run, values: Tensor) -> None:
        """Put elements [n] in the run's place."""
        segment = self._segment(tensors, run)
        if segment.is_contiguous():
            segment.view(-1)[run.start : run.stop].copy_(values)
        else:
            whole = segment.reshape(-1)
            whole[run.start : run.stop] = values
            segment.copy_(whole.view(segment.shape))

    @torch.no_grad()
    def collect(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the runs of others from their owners; our own are sent as they are."""
        self.begin_collect(tensors)()

    @torch.no_grad()
    def begin_collect(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """`collect`, begun: it is done when what this returns was called. Members begin in one order."""
        ends = [part._begin_collect(tensors) for part in self.by_axis() if part.axis.size > 1]

        def end() -> None:
            for one in ends:
                one()

        return end

    def _begin_collect(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        mine = joined(self.read(tensors, run) for run in self.own)
        found = [mine.new_empty(sum(run.size for run in self.of(owner))) for owner in range(self.axis.size)]
        pending = self.axis.begin_exchange([mine] * self.axis.size, found)

        @torch.no_grad()
        def end() -> None:
            for work in pending:
                work.wait()
            for owner in range(self.axis.size):
                if owner != self.axis.index:
                    runs = self.of(owner)
                    for run, values in zip(runs, found[owner].split([run.size for run in runs]), strict=True):
                        self.write(tensors, run, values)

        return end

    def _choose(self) -> None:
        self.own = [run for run in self.runs if run.owner == self.axis_of(run.name).index]

    def _segment(self, tensors: Mapping[str, Tensor], run: Run) -> Tensor:
        return self.cuts[run.name].segments(tensors[run.name].detach())[run.segment]


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Tensors [n] back to back, float32; empty for none."""
    found = list(parts)
    return torch.cat(found) if found else torch.empty(0)
