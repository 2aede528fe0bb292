"""The device class: the machines that share one set of bits.

The bit contract holds within a class. A class is written into checkpoints and reported; results of two
classes are close, not equal. Which kernels are built follows from it (`ops.build`).
"""

from __future__ import annotations

import platform

import torch

BF16_CLASS = "cpu-avx512-bf16"
_BF16_NEEDS = {"avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"}
_SETS = _BF16_NEEDS | {"avx512_vnni", "amx_int8", "amx_bf16", "amx_fp16"}


def device_class(device: torch.device | str = "cpu") -> str:
    """`cpu-avx512-bf16` (products of bfloat16 go by pairs, through the processor's dot product of them), `cpu-fma`
    (all products are chains of fused multiply-adds: AVX2 and AVX-512 builds give the same bits), `cpu-generic` (no such
    instructions), or an accelerator's type with its compute capability: `cuda-sm90`.

    Where ATEN_CPU_CAPABILITY keeps PyTorch from AVX-512, a processor with bf16 dot products is `cpu-fma`.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        capability = torch.get_device_module(kind).get_device_capability(device)
        return f"{kind}-sm{capability[0]}{capability[1]}" if isinstance(capability, tuple) else kind
    sets = instruction_sets()
    if sets >= _BF16_NEEDS and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return BF16_CLASS
    return "cpu-fma" if {"avx2", "fma3"} <= sets else "cpu-generic"


def instruction_sets() -> frozenset[str]:
    """The vector and matrix instruction sets of this processor that matter here, by PyTorch's names."""
    capabilities = torch.cpu.get_capabilities()
    return frozenset(name for name in _SETS if capabilities.get(name))


def processor() -> str:
    """The processor's name."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine())
