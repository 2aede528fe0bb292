"""One number for all weights, so that two results can be compared by eye."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lockstep.model.decoder import Decoder
from lockstep.model.families import FAMILIES, gguf_names, hf_names
from lockstep.model.files import read_json
from lockstep.model.hf_config import read_config
from lockstep.model.load import resolve
from lockstep.model.weights import Stored, read_gguf, read_safetensors
from lockstep.model.weights.fill import check_fit


def hash_path(path: str | Path) -> str:
    """SHA-256 of the weights of whatever `load` reads, as stored: sharding, file layout and order do not matter.

    A tied head counts once, whether the file repeats it or not. GGUF weights are hashed dequantised, in float32.
    """
    found = resolve(path)
    if found.is_file():
        model = read_gguf(found)
        config, stored = model.config, model.tensors
    else:
        config = read_config(read_json(found / "config.json"), str(found / "config.json"))
        stored = read_safetensors(found)
    decoder = Decoder(config)
    ours = [name for name, _ in decoder.named_parameters()]
    names = gguf_names(ours) if found.is_file() else hf_names(ours, FAMILIES[config.family])
    check_fit(decoder, stored, names, str(found))
    return hash_tensors(_read(stored, names))


def _read(stored: Mapping[str, Stored], names: Mapping[str, str]) -> Iterable[tuple[str, Tensor]]:
    for name in sorted(names):
        yield name, stored[names[name]].read()


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor. Give them sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name} {dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
