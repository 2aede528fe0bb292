"""Every kernel of a build on odd sizes (tails in every loop), as one hash of all results."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lockstep.ops import Packed, build
from lockstep.ops.linear import input_gradient, weight_gradient
from lockstep.ops.operators import _CONTRACT as ops


def fingerprint_of(isa: str, optimize: str = "-O3") -> str:
    """Of another build than the process has: which kernels one has cannot change. With -O1 it takes a third of the
    time."""
    known = build._ISA | build.EMULATED
    build.EMULATED[isa + optimize] = [*known[isa], optimize]
    return fingerprint(isa + optimize)


def fingerprint(isa: str) -> str:
    build.load(isa)
    torch.manual_seed(0)
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape).to(dtype).requires_grad_()

        x, w, b = make(101, 77), make(53, 77), make(53)
        q, k, v = make(101, 6, 32), make(101, 2, 32), make(101, 2, 32)
        table = torch.randn(101, 16, 2)
        batch = Packed.of([70, 31])
        outputs = [
            ops.linear(x, w, b),
            ops.linear(x.detach(), ops.pack(w, dtype)),
            ops.rms_norm(x, make(77), 1e-5, 1.0),
            ops.gated(x, make(101, 77) * 20, "silu"),
            ops.gated(make(101, 77) * 3, x, "gelu_tanh"),
            ops.rope(q, batch.positions, table),
            ops.attention(q, k, v, batch, 0.5, 40),
            ops.attention(q * 30, k, v, batch, 0.5),
            ops.log_softmax(x.detach().float() * 9),
            ops.embedding(torch.arange(101) % 53, w, dtype, 1.5),
            ops.linear_cross_entropy(x, w, torch.arange(101) % 54 - 1, torch.rand(101), 0.1)[0],
        ]
        # Sums as they are: rounded to bfloat16 another order of them hardly shows.
        plain = x.detach()
        outputs += [ops.linear(plain, w.detach(), out_dtype=torch.float32), weight_gradient(plain, plain.flip(0))]
        outputs.append(input_gradient(plain, plain[:77].contiguous(), torch.float32))
        packed = [ops.pack(w[:n].detach(), dtype) for n in (53, 20, 17)]
        for rows in (1, 2, 3, 7, 8, 9, 10, 13):  # the ways of cutting few rows into tiles
            part = x.detach()[:rows]
            outputs += torch.ops.lockstep.gemm_three(
                part, *(p.panels for p in packed), 53, 20, 17, b.detach(), None, None
            )
            outputs.append(torch.ops.lockstep.gemm_add(torch.randn(rows, 20), part, packed[1].panels))
        sum(y.float().square().sum() for y in outputs if y.requires_grad).backward()
        for t in [*outputs, x.grad, w.grad, b.grad, q.grad, k.grad, v.grad]:
            digest.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
