"""safetensors directories: one model.safetensors, or shards with an index. Files are memory-mapped, not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.model.weights.fill import Stored

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_safetensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a model directory as a view of its mapped file (private: writing never reaches the file)."""
    found: dict[str, Stored] = {}
    for file in _files(directory):
        for name, tensor in _open(file).items():
            found[name] = Stored(tuple(tensor.shape), partial(_same, tensor), view=True)
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _files(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise LockstepError(
            f"{directory} has neither {_SINGLE} nor {_INDEX}: weights must be in safetensors form "
            "(a pytorch_model.bin becomes one by transformers' save_pretrained)"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise LockstepError(f"{index} is no index of safetensors shards: {error!r}") from error
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise LockstepError(f"{directory}: shards named in {_INDEX} are missing: {', '.join(absent)}")
    return [directory / name for name in names]


def _open(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(file), "pt") as opened:
            return dict(opened.get_tensors())
    except (SafetensorError, OSError) as error:
        raise LockstepError(f"{file} is damaged or incomplete: {error}; fetch or export it again") from error


def write_safetensors(directory: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Write contiguous CPU tensors as model.safetensors, or as shards of at most shard_bytes with an index."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        save_tensors(shards[0], directory / _SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, directory / name)
        weight_map |= dict.fromkeys(shard, name)
    index: dict[str, Any] = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}}
    (directory / _INDEX).write_text(json.dumps({**index, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """One safetensors file, readable by whoever may read its neighbours (the library makes it private)."""
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(0o644)


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
