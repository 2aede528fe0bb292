"""One sequence through paged attention, in chunks, in shuffled pages."""

import torch
from torch import Tensor

from lockstep.ops import PAGE, KVPages, Operators, Paged


def paged_outputs(
    ops: Operators,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: list[int],
    window: int | None = None,
    fill: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """The attention output [T, H, d] of a sequence computed chunk by chunk; pages start full of `fill`."""
    length = len(q)
    count = -(-length // PAGE)
    pages = KVPages.zeros(count + 2, k.shape[1], k.shape[2], k.dtype)
    pages.k.fill_(fill)
    pages.v.fill_(fill)
    order = torch.randperm(count + 2, generator=torch.Generator().manual_seed(length))[:count]
    table = order.to(torch.int32)[None]
    outputs, at = [], 0
    for chunk in chunks:
        rows = slice(at, at + chunk)
        positions = torch.arange(at, at + chunk, dtype=torch.int32)
        batch = Paged(positions, torch.tensor([0, chunk], dtype=torch.int32), table)
        ops.write_kv(k[rows], v[rows], pages, batch)
        outputs.append(ops.paged_attention(q[rows], pages, batch, 0.2, window, softcap))
        at += chunk
    assert at == length
    return torch.cat(outputs)
