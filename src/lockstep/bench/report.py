"""What a bench found, as a value: a table of texts for people, and the numbers behind it for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lockstep.bench.machine import Machine


@dataclass(frozen=True)
class Report:
    """One bench's result.

    name: the section it fills, one word. command: what makes it again. columns and rows: the table; the first column
    is left-aligned in every form. notes: sentences below the table, such as why a target is missed. data: the numbers
    behind the rows, JSON types only.
    """

    name: str
    title: str
    command: str
    machine: Machine
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    data: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{len(row)} cells under {len(self.columns)} columns: {row}"

    def markdown(self) -> str:
        """The section: heading, command, machine, table, notes."""
        lines = [f"## {self.title}", "", f"`{self.command}` on {self.machine.line()}", ""]
        lines.append(_line(self.columns))
        lines.append("|" + "|".join(["---", *["---:"] * (len(self.columns) - 1)]) + "|")
        lines += [_line(row) for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """The numbers, with the machine and the command."""
        whole = {"bench": self.name, "command": self.command, "machine": self.machine.as_dict(), "result": self.data}
        return json.dumps({**whole, "notes": list(self.notes)}, indent=2) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
