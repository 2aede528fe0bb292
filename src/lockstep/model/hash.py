"""One number for all weights, so that two results can be compared by eye."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lockstep.model.decoder import Decoder
from lockstep.model.families import FAMILIES, gguf_names, hf_names
from lockstep.model.files import read_json
from lockstep.model.hf_config import read_config
from lockstep.model.lora import read_adapter
from lockstep.model.source import adapter_base, resolve
from lockstep.model.weights import read_gguf, read_safetensors
from lockstep.model.weights.fill import check_fit


def hash_path(path: str | Path) -> str:
    """SHA-256 of the weights of whatever `load` reads, as stored: sharding, file layout and order do not matter.

    A tied head counts once, whether the file repeats it or not. GGUF weights are hashed dequantised, in float32.
    Of an adapter directory: the base model's weights, then the adapter's.
    """
    return hash_tensors(_tensors(resolve(path)))


def _tensors(found: Path) -> Iterator[tuple[str, Tensor]]:
    if (found / "adapter_config.json").is_file():
        yield from _tensors(adapter_base(found))
        yield from sorted(read_adapter(found)[1].items())
        return
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
