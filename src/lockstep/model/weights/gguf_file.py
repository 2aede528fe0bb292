"""GGUF files in: configuration, and tensors dequantised straight into the dtype they are wanted in."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.model import ModelConfig, RopeScaling
from lockstep.errors import LockstepError
from lockstep.model.families import FAMILIES
from lockstep.model.gguf_config import gguf_config
from lockstep.model.gguf_header import Header, TensorInfo, read_header
from lockstep.model.hf_config import validated
from lockstep.model.rope import frequencies
from lockstep.model.weights.fill import Stored
from lockstep.ops import Operators, operators
from lockstep.ops.dequantize import FORMATS

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS = {0: "F32", 1: "F16", 30: "BF16"} | {form.number: name for name, form in FORMATS.items()}
"""ggml's numbers of the types that can be read, and their names."""

QUANT_TYPES = tuple(_KINDS.values())
"""The ggml types that can be read."""


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file holds: the configuration, its metadata (the tokenizer is in it) and its tensors by GGUF name."""

    config: ModelConfig
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


@dataclass(frozen=True)
class _Target:
    """What dequantises, and into which dtype."""

    ops: Operators
    dtype: torch.dtype


def read_gguf(file: Path, dtype: torch.dtype = torch.float32, ops: Operators | None = None) -> GgufModel:
    """Read the header; a tensor is dequantised, in dtype, when it is read.

    ops: whose dequantiser reads; the bits are the same under both. LockstepError for what is not supported.
    """
    header = read_header(file)
    config = gguf_config(header, str(file))
    scaling = _scaling(header, config, str(file))
    if scaling is not None:
        config = validated(config.model_dump() | {"rope_scaling": scaling}, str(file))
    into = _Target(ops or operators("fast"), dtype)
    tensors = {name: _stored(name, info, header, config, into, file) for name, info in header.tensors.items()}
    return GgufModel(config, header.metadata, tensors)


def _scaling(header: Header, config: ModelConfig, source: str) -> RopeScaling | None:
    architecture = header.metadata["general.architecture"]
    kind = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=header.metadata[f"{architecture}.rope.scaling.factor"])
    if kind != "none":
        raise LockstepError(f"{source}: rope scaling {kind!r} is not supported; known are linear and llama3")
    if "rope_freqs.weight" not in header.tensors:
        return None
    divisors = torch.empty(header.tensors["rope_freqs.weight"].shape)
    _read(header.tensors["rope_freqs.weight"], header, operators("fast"), divisors)
    return _llama3(divisors, config, source)


def _llama3(divisors: Tensor, config: ModelConfig, source: str) -> RopeScaling:
    """GGUF stores what each frequency is divided by, not Llama 3's parameters: find the factor that gives them."""
    scaling = RopeScaling(kind="llama3", factor=float(divisors.max()))
    plain = frequencies(config.head_dim, config.rope_theta, None)
    ours = plain / frequencies(config.head_dim, config.rope_theta, scaling)
    if not torch.allclose(ours, divisors, rtol=1e-4):  # the writer computed them in another order
        raise LockstepError(f"{source}: rope_freqs.weight is not Llama 3's scaling, so its positions are unknown")
    return scaling


def _stored(name: str, info: TensorInfo, header: Header, config: ModelConfig, into: _Target, file: Path) -> Stored:
    kind = _KINDS.get(info.kind)
    if kind is None:
        from gguf import GGMLQuantizationType

        known = {known.value: known.name for known in GGMLQuantizationType}
        found = known.get(info.kind, info.kind)
        raise LockstepError(f"{file}: tensor {name} is of type {found}; supported are {', '.join(QUANT_TYPES)}")
    if info.offset + _bytes(info, kind) > len(header.data):
        raise LockstepError(f"{file} is damaged or incomplete: it ends within tensor {name}; fetch it again")
    return Stored(info.shape, lambda: _natural(name, info, header, config, into))


def _bytes(info: TensorInfo, kind: str) -> int:
    count = prod(info.shape)
    return count * _PLAIN[kind].itemsize if kind in _PLAIN else count // FORMATS[kind].count * FORMATS[kind].size


def _natural(name: str, info: TensorInfo, header: Header, config: ModelConfig, into: _Target) -> Tensor:
    """Undo what the conversion to GGUF did: rotary rows interleaved (llama), 1 added to norm weights (Gemma)."""
    out = torch.empty(info.shape, dtype=into.dtype)
    offset = FAMILIES[config.family].gguf_norm_offset
    leaf = name.split(".")[2] if name.startswith("blk.") else ""
    if offset and name.endswith("norm.weight"):
        wide = torch.empty(info.shape)
        _read(info, header, into.ops, wide)
        return out.copy_(wide - offset)
    if config.family == "llama" and leaf in ("attn_q", "attn_k"):
        stored = torch.empty_like(out)
        _read(info, header, into.ops, stored)
        heads = config.num_heads if leaf == "attn_q" else config.num_kv_heads
        halves = out.view(heads, 2, config.head_dim // 2, *out.shape[1:])
        halves.copy_(stored.view(heads, config.head_dim // 2, 2, *out.shape[1:]).transpose(1, 2))
        return out
    _read(info, header, into.ops, out)
    return out


def _read(info: TensorInfo, header: Header, ops: Operators, out: Tensor) -> None:
    """Fill `out` with a tensor's values in the file's own row order."""
    kind = _KINDS[info.kind]
    if not out.numel():
        return
    raw = torch.frombuffer(header.data, dtype=torch.uint8, count=_bytes(info, kind), offset=info.offset)
    if kind in _PLAIN:
        out.view(-1).copy_(raw.view(_PLAIN[kind]))
    else:
        ops.dequantize(raw, kind, out)
