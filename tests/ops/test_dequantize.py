"""The dequantiser's kernel against the `gguf` package: every format, any bytes, equal bits."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from lockstep.ops import operators
from lockstep.ops.dequantize import FORMATS

SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # fmt: skip
"""Where a block's float16 scales lie."""


def random_blocks(name: str, count: int) -> torch.Tensor:
    """Random bytes, random scales: subnormal, negative, zero and infinite ones too, no NaN (its payload is open)."""
    rng = np.random.default_rng(count)
    raw = rng.integers(0, 256, (count, FORMATS[name].size), dtype=np.uint8)
    for start in SCALES[name]:
        scale = rng.integers(0, 1 << 16, count, dtype=np.uint16)
        scale[scale & 0x7C00 == 0x7C00] = 0x03FF
        scale[:4] = (0x0000, 0x8000, 0x0001, 0x83FF)
        raw[:, start : start + 2] = scale.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(raw.reshape(-1))


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_the_packages(name):
    kind, form = GGMLQuantizationType[name], FORMATS[name]
    assert (form.number, form.count, form.size) == (kind.value, *GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_and_package_agree_bit_by_bit(name, dtype):
    blocks = random_blocks(name, 1531)
    ours = torch.empty(1531, FORMATS[name].count, dtype=dtype)
    plain = torch.empty_like(ours)
    operators("bitwise").dequantize(blocks, name, ours)
    operators("fast").dequantize(blocks, name, plain)
    wanted = torch.from_numpy(gguf.dequantize(blocks.view(1531, -1).numpy(), GGMLQuantizationType[name])).to(dtype)
    assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(plain.view(torch.uint8), wanted.view(torch.uint8))


def test_every_half_scale():
    """All finite float16 scales, with the quant 1: the conversion from float16 is exact."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[halves & 0x7C00 != 0x7C00]
    raw = np.ones((len(halves), 34), dtype=np.uint8)
    raw[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    out = torch.empty(len(halves), 32)
    operators("bitwise").dequantize(torch.from_numpy(raw.reshape(-1)), "Q8_0", out)
    assert np.array_equal(out[:, 0].numpy().view(np.uint32), halves.view(np.float16).astype(np.float32).view(np.uint32))


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="35 bytes are not the blocks of 32 values"):
        operators("bitwise").dequantize(torch.zeros(35, dtype=torch.uint8), "Q8_0", torch.empty(32))
