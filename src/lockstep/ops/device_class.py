"""The device class: the machines that share one set of bits.

The bit contract holds within a class. A class is written into checkpoints and reported; results of two
classes are close, not equal. Which kernels are built follows from it (`ops.build`).
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache

import torch

AMX_CLASS, BF16_CLASS = "cpu-amx-bf16", "cpu-avx512-bf16"
_BF16_NEEDS = {"avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"}
_AMX_NEEDS = _BF16_NEEDS | {"amx_tile", "amx_bf16"}
_SETS = _AMX_NEEDS | {"avx512_vnni", "amx_int8", "amx_fp16"}


def device_class(device: torch.device | str = "cpu") -> str:
    """`cpu-amx-bf16` (products of bfloat16 go by tiles, through the processor's matrix unit), `cpu-avx512-bf16` (they
    go by pairs, through its dot product of them), `cpu-fma` (all products are chains of fused multiply-adds: AVX2 and
    AVX-512 builds give the same bits), `cpu-generic` (no such instructions), or an accelerator's type with its compute
    capability: `cuda-sm90`.

    What keeps other products on such a processor from an instruction keeps these from it too: ATEN_CPU_CAPABILITY
    PyTorch's from AVX-512 (then it is `cpu-fma`), ONEDNN_MAX_CPU_ISA oneDNN's from AMX (then `cpu-avx512-bf16`), and
    so is one whose system does not give a process the matrix unit.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        capability = torch.get_device_module(kind).get_device_capability(device)
        return f"{kind}-sm{capability[0]}{capability[1]}" if isinstance(capability, tuple) else kind
    sets = instruction_sets()
    if sets >= _BF16_NEEDS and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return AMX_CLASS if sets >= _AMX_NEEDS and _amx_is_asked_for() and _amx_is_given() else BF16_CLASS
    return "cpu-fma" if {"avx2", "fma3"} <= sets else "cpu-generic"


def environment_for(name: str) -> str:
    """The variable, with its value, that makes this processor one of another class; nothing where none does."""
    by = {"cpu-fma": "ATEN_CPU_CAPABILITY=avx2"}
    if device_class() == AMX_CLASS:
        by[BF16_CLASS] = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    return by.get(name, "") if device_class() in (AMX_CLASS, BF16_CLASS) else ""


def _amx_is_asked_for() -> bool:
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return most in ("", "DEFAULT", "ALL") or "AMX" in most


@lru_cache
def _amx_is_given() -> bool:
    """Whether this process may use tile registers: Linux gives them to those that ask, for all of their threads."""
    return torch.cpu._init_amx()


def instruction_sets() -> frozenset[str]:
    """The vector and matrix instruction sets of this processor that matter here, by PyTorch's names."""
    capabilities = torch.cpu.get_capabilities()
    return frozenset(name for name in _SETS if capabilities.get(name))


def processor() -> str:
    """The processor's name."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine())
