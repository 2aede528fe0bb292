"""A pipeline schedule is a value: for every device, the ordered list of its steps."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from lockstep.config import strict_yaml
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.parallel.schedules.program import Program

KINDS = ("F", "B", "W", "BW")
PLACEMENTS = ("loop", "v")


class ScheduleError(LockstepError):
    """A schedule that cannot be made, read or executed."""


class Step(NamedTuple):
    """One piece of work of a device.

    ``kind``: ``F`` forward, ``B`` gradient of the input, ``W`` gradient of the weights, ``BW`` both at once (one
    atomic step; its gradient leaves at the end). ``partner``: the full backward of another micro-batch that runs
    overlapped with this forward; the two are one atomic step and send together.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    partner: Step | None = None

    @property
    def parts(self) -> tuple[Step, ...]:
        """The one or two plain steps that this step consists of, the forward first."""
        return (self,) if self.partner is None else (self._replace(partner=None), self.partner)

    def __str__(self) -> str:
        text = f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")
        return text if self.partner is None else f"{text}&{self.partner}"


@dataclass(frozen=True)
class Table:
    """The steps of ``stages`` devices, each holding ``chunks`` groups of layers, for ``micro_batches`` micro-batches.

    ``placement`` says which group a chunk is: ``loop`` puts group ``c * stages + s`` at chunk ``c`` of device ``s``;
    ``v`` turns round at the ends, so that device 0 holds the first and (for two chunks) the last group.
    Tables compare by value. ``check`` (in this folder) says whether one can be executed.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    placement: str
    rows: tuple[tuple[Step, ...], ...]

    @property
    def groups(self) -> int:
        """Number of layer groups: ``stages * chunks``."""
        return self.stages * self.chunks

    def group(self, device: int, chunk: int) -> int:
        """The layer group that ``device`` holds as its ``chunk``."""
        turned = self.placement == "v" and chunk % 2 == 1
        return chunk * self.stages + (self.stages - 1 - device if turned else device)

    def holder(self, group: int) -> tuple[int, int]:
        """The (device, chunk) that holds a layer group."""
        chunk, place = divmod(group, self.stages)
        turned = self.placement == "v" and chunk % 2 == 1
        return (self.stages - 1 - place if turned else place), chunk

    @cached_property
    def split_backward(self) -> bool:
        """Whether any weight gradient is a step of its own."""
        return any(step.kind == "W" for row in self.rows for step in row)

    @cached_property
    def program(self) -> Program:
        """The table checked and laid out for simulation, once. Raises :class:`ScheduleError` if it is not valid."""
        from lockstep.parallel.schedules.program import lay_out  # it is built on this file

        return lay_out(self)

    def __str__(self) -> str:
        title = f"{self.name}: {self.stages} devices x {self.chunks} chunks, {self.micro_batches} micro-batches"
        width = len(str(self.stages - 1))
        return "\n".join([title, *(f"{s:>{width}}: {line(row)}" for s, row in enumerate(self.rows))])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML or JSON; each row is one line of text such as ``F0 F1 B0 W0``."""
        head = {k: getattr(self, k) for k in ("name", "stages", "micro_batches", "chunks", "placement")}
        return head | {"rows": [line(row) for row in self.rows]}

    def save(self, path: str | Path) -> None:
        """Writes the table: JSON if the name ends in ``.json``, YAML otherwise."""
        path = Path(path)
        data = self.to_dict()
        as_json = path.suffix == ".json"
        path.write_text(json.dumps(data, indent=1) if as_json else yaml.safe_dump(data, sort_keys=False, width=1 << 30))

    def differences(self, other: Table) -> list[str]:
        """What differs from ``other``, in words; empty when the two are equal."""
        heads = ("name", "stages", "micro_batches", "chunks", "placement")
        said = [
            f"{k}: {getattr(self, k)} / {getattr(other, k)}" for k in heads if getattr(self, k) != getattr(other, k)
        ]
        for device, (mine, theirs) in enumerate(zip(self.rows, other.rows, strict=False)):
            said += _row_differences(device, mine, theirs)
        return said


def line(row: tuple[Step, ...]) -> str:
    """One device's steps as text."""
    return " ".join(map(str, row))


def without(table: Table, micro_batches: int) -> Table:
    """The table with the first ``micro_batches`` only; leaving others out keeps every dependency of the rest."""
    rows = []
    for row in table.rows:
        parts = (tuple(part for part in step.parts if part.micro_batch < micro_batches) for step in row)
        rows.append(tuple(p[0]._replace(partner=p[1]) if len(p) == 2 else p[0] for p in parts if p))
    return Table(table.name, table.stages, micro_batches, table.chunks, table.placement, tuple(rows))


def load_table(path: str | Path) -> Table:
    """Reads what :meth:`Table.save` wrote. Raises :class:`ScheduleError` for anything else."""
    try:
        content = strict_yaml.parse(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, LockstepError) as error:
        raise ScheduleError(f"the schedule's table {path} cannot be read as YAML or JSON: {error}") from error
    return table_from_dict(content, where=str(path))


def table_from_dict(data: Any, where: str = "table") -> Table:
    """The inverse of :meth:`Table.to_dict`."""
    wanted = {"name": str, "stages": int, "micro_batches": int, "chunks": int, "placement": str, "rows": list}
    if not isinstance(data, dict):
        raise ScheduleError(f"{where}: expected a mapping with the keys {', '.join(wanted)}, found {data!r}.")
    for key, kind in wanted.items():
        if not isinstance(data.get(key), kind):
            raise ScheduleError(f"{where}: key {key!r} is {data.get(key)!r}; expected {kind.__name__}. Write it.")
    if data["placement"] not in PLACEMENTS:
        raise ScheduleError(f"{where}: placement {data['placement']!r} is unknown; use one of {', '.join(PLACEMENTS)}.")
    rows = tuple(tuple(_parse(word, where) for word in str(row).split()) for row in data["rows"])
    return Table(data["name"], data["stages"], data["micro_batches"], data["chunks"], data["placement"], rows)


def _parse(word: str, where: str) -> Step:
    text, _, other = word.partition("&")
    kind = text.rstrip("0123456789.")
    micro_batch, _, chunk = text[len(kind) :].partition(".")
    if kind not in KINDS or not micro_batch.isdecimal() or (chunk and not chunk.isdecimal()):
        raise ScheduleError(f"{where}: {word!r} is not a step; write F, B, W or BW, a micro-batch, and .chunk (F3.1).")
    return Step(kind, int(micro_batch), int(chunk or 0), _parse(other, where) if other else None)


def _row_differences(device: int, mine: tuple[Step, ...], theirs: tuple[Step, ...]) -> list[str]:
    matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    return [
        f"device {device}, steps {a}-{b}: {line(mine[a:b]) or 'nothing'} / {line(theirs[c:d]) or 'nothing'}"
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]
