"""Metrics of a run: JSON lines in ``<out>/metrics.jsonl``, and TensorBoard events beside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

FILE = "metrics.jsonl"


class Writer(Protocol):
    """What takes a run's metrics."""

    def write(self, step: int, **values: Any) -> None: ...
    def close(self) -> None: ...


class Nowhere:
    """Takes the metrics of a rank that writes none."""

    def write(self, step: int, **values: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Metrics:
    """Writes one JSON object per line, flushed at once, so that a killed run has all its lines.

    first_step: lines of this step and later, which an earlier process wrote before it was killed, are dropped:
    the run goes on from there and writes them again. note: is told, once, when the disk takes no more lines; the run
    does not end for that, and lines that are kept back are written when there is room again.
    """

    def __init__(self, out: Path, first_step: int, tensorboard: bool, note: Callable[[str], None]) -> None:
        self._path, self._note, self._told = out / FILE, note, False
        _drop_from(self._path, first_step)
        self._file = self._path.open("a")
        self._board = _board(out, first_step) if tensorboard else None

    def write(self, step: int, **values: Any) -> None:
        """One line; numbers go to TensorBoard too. step: 1-based, the update that was just made."""
        # A NaN is no JSON: it is written as a string.
        line = {k: repr(v) if isinstance(v, float) and v - v != 0.0 else v for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **line}) + "\n")
        self._try(self._file.flush)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._try(self._file.close)
        if self._board is not None:
            self._try(self._board.close)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._told:
                self._note(f"metrics cannot be written to {self._path}: {error.strerror or error}. Training goes on")
            self._told = True


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run. One that a kill or a full disk cut short is left out."""
    path = out / FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [found for line in lines if (found := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _drop_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in read_metrics(path.parent) if line["step"] < first_step]
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(beside, path)


def _board(out: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and not wanted by everybody

    return SummaryWriter(str(out / "tensorboard"), purge_step=first_step)
