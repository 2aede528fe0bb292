"""The device class: the machines that share one set of bits.

The bit contract holds within a class. A class is written into checkpoints and reported; results of two
classes are close, not equal.
"""

from __future__ import annotations

import platform

import torch

_SETS = ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "amx_fp16")


def device_class(device: torch.device | str = "cpu") -> str:
    """`cpu-avx512-bf16`, `cpu-fma` (fused multiply-add on vectors, no bf16 dot products), `cpu-generic`, or an
    accelerator's type with its compute capability, such as `cuda-sm90`."""
    kind = torch.device(device).type
    if kind != "cpu":
        capability = torch.get_device_module(kind).get_device_capability(device)
        return f"{kind}-sm{capability[0]}{capability[1]}" if isinstance(capability, tuple) else kind
    sets = instruction_sets()
    if "avx512_bf16" in sets:
        return "cpu-avx512-bf16"
    return "cpu-fma" if {"avx2", "fma3"} <= sets else "cpu-generic"


def instruction_sets() -> frozenset[str]:
    """The vector and matrix instruction sets of this processor that matter here, by PyTorch's names."""
    capabilities = torch.cpu.get_capabilities()
    return frozenset(name for name in _SETS if capabilities.get(name))


def processor() -> str:
    """The processor's name."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine())
