"""The device class: the machines that share one set of bits.

The bit contract holds within a class. A class is written into checkpoints and reported; results of two
classes are close, not equal.
"""

from __future__ import annotations

import platform

import torch

_SETS = ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "amx_fp16")


def device_class(device: torch.device | str = "cpu") -> str:
    """`cpu-fma` (products are chains of fused multiply-adds: AVX2 and AVX-512 builds give the same bits),
    `cpu-generic` (no such instructions), or an accelerator's type with its compute capability: `cuda-sm90`.

    A processor with bf16 dot products is `cpu-fma` too: the kernels do not use those, so its bits are the same.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        capability = torch.get_device_module(kind).get_device_capability(device)
        return f"{kind}-sm{capability[0]}{capability[1]}" if isinstance(capability, tuple) else kind
    sets = instruction_sets()
    return "cpu-fma" if {"avx2", "fma3"} <= sets else "cpu-generic"


def instruction_sets() -> frozenset[str]:
    """The vector and matrix instruction sets of this processor that matter here, by PyTorch's names."""
    capabilities = torch.cpu.get_capabilities()
    return frozenset(name for name in _SETS if capabilities.get(name))


def processor() -> str:
    """The processor's name."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine())
