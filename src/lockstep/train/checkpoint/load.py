"""Loading: a checkpoint is verified file by file before anything of it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from lockstep.config import strict_yaml
from lockstep.errors import LockstepError
from lockstep.train.checkpoint.layout import RUN_CONFIG, newest_whole
from lockstep.train.checkpoint.manifest import Manifest, verify


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Tensors are read when asked for."""

    path: Path
    manifest: Manifest

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """The tensors of ``<stem>.safetensors``."""
        return load_file(self.path / f"{stem}.safetensors")

    def document(self, stem: str) -> Any:
        """The value of ``<stem>.json``."""
        return json.loads((self.path / f"{stem}.json").read_text())

    def config(self) -> dict[str, Any]:
        """The run's configuration, as plain values."""
        tree: dict[str, Any] = strict_yaml.parse((self.path / RUN_CONFIG).read_text(encoding="utf-8"), RUN_CONFIG)
        return tree


def load_checkpoint(path: Path, out: Path | None = None) -> Checkpoint:
    """Verify a checkpoint. If it is damaged, the error names the newest whole one of the run at ``out``."""
    try:
        return Checkpoint(path, verify(path))
    except LockstepError as error:
        whole = newest_whole(out or path.parent.parent)
        advice = f"the newest whole checkpoint is {whole}: continue with --resume-from {whole}"
        raise LockstepError(f"{error}; {advice if whole else 'the run has no whole checkpoint'}") from error


def check_shapes(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise, naming every tensor, if names, shapes or dtypes differ from those of the model."""
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not in the model" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        have, want = found[name], expected[name]
        if have.shape != want.shape:
            faults.append(f"{name} is {list(have.shape)}, the model has {list(want.shape)}")
        elif have.dtype != want.dtype:
            faults.append(f"{name} is {have.dtype}, the model has {want.dtype}")
    if faults:
        shown = "; ".join(sorted(faults)[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise LockstepError(f"checkpoint {path} does not fit the model: {shown}")
