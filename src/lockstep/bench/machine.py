"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from lockstep.cores import usable_cores
from lockstep.ops.device_class import device_class, processor


@dataclass(frozen=True)
class Machine:
    """What ran, on what, when. load: the one-minute load average when the measurement began; above the number of
    cores other programs ran too, and the times are too long."""

    processor: str
    device_class: str
    cores: int
    threads: int
    load: float
    date: str
    versions: dict[str, str]

    def line(self) -> str:
        """One line for a document."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        busy = f"; load {self.load:.1f}: other programs ran too" if self.load > self.cores / 2 else ""
        return (
            f"{self.processor}, {self.cores} cores, {self.threads} threads, `{self.device_class}`; {versions}; "
            f"{self.date}{busy}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(*packages: str) -> Machine:
    """This machine now, with the versions of Lockstep, PyTorch and these packages (those that are installed)."""
    versions = {"lockstep": metadata.version("lockstep"), "torch": torch.__version__}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["Python"] = platform.python_version()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return Machine(
        processor(), device_class(), usable_cores(), torch.get_num_threads(), os.getloadavg()[0], date, versions
    )
