"""Every operator in plain PyTorch: the tests' oracle (in float64) and what ``numerics: fast`` runs.

Shapes and meanings are those of ``Operators``; nothing here keeps the bit contract.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.ops import int8_pages
from lockstep.ops.adamw import AdamWFactors
from lockstep.ops.batch import PAGE, Int8Pages, KVPages, Packed, Paged
from lockstep.ops.dequantize import FORMATS
from lockstep.ops.tree import SQUARE_BLOCK, tree_sum


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return y if out_dtype is None else y.to(out_dtype)


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out_dtype: torch.dtype | None = None
) -> Tensor:
    dtype = out_dtype or x.dtype
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (weight.to(dtype).to(wide) + offset)).to(dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    dtype = out_dtype or x.dtype
    wide = torch.promote_types(x.dtype, torch.float32)
    rounded = None if bias is None else bias.to(dtype).to(wide)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(dtype).to(wide), rounded, eps).to(dtype)


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = table[positions.long()].to(wide)[:, None].unbind(-1)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def activation(x: Tensor, name: str) -> Tensor:
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh")


def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (activation(gate.to(wide), name) * up.to(wide)).to(gate.dtype)


def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    rows = F.embedding(tokens.long(), weight).to(dtype)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=dtype)


def embedding_part(
    tokens: Tensor, weight: Tensor, dtype: torch.dtype, scale: float, first: int, vocabulary: int
) -> Tensor:
    """vocabulary: for `lockstep.ops.embedding.embedding_part`, which checks it."""
    inside = ((tokens >= first) & (tokens < first + len(weight)))[:, None]
    rows = embedding((tokens - first).clamp(0, len(weight) - 1), weight, dtype, scale)
    return torch.where(inside, rows, -torch.zeros_like(rows))


def attend(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, softcap: float) -> Tensor:
    """One sequence: q [n, Hq, d] at positions first.., k and v [m, Hkv, d] at positions 0..m-1."""
    rows = torch.arange(first, first + q.shape[0])[:, None]
    keys = torch.arange(k.shape[0])[None, :]
    visible = keys <= rows
    if window is not None:
        visible &= rows - keys < window
    if softcap:
        return _attend_capped(q, k, v, visible, scale, softcap)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
        attn_mask=visible, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    """`attend` where the scores go through a soft cap, which PyTorch's attention does not have."""
    per = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(per, 1), v.repeat_interleave(per, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k.to(wide)) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.to(wide)).to(q.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Packed, scale: float, window: int | None = None, softcap: float = 0.0
) -> Tensor:
    ends = batch.starts.tolist()
    parts = [attend(q[a:b], k[a:b], v[a:b], 0, scale, window, softcap) for a, b in pairwise(ends)]
    return torch.cat(parts)


def write_kv(k: Tensor, v: Tensor, pages: KVPages | Int8Pages, batch: Paged) -> None:
    page, offset = slots(batch)
    if isinstance(pages, Int8Pages):
        return int8_pages.write(k, v, pages, page, offset)
    pages.k[page, :, :, offset] = k
    pages.v[page, :, offset] = v


def slots(batch: Paged) -> tuple[Tensor, Tensor]:
    """The page and the place in it of every row."""
    counts = batch.starts.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    positions = batch.positions.long()
    return batch.page_table[sequence, positions // PAGE].long(), positions % PAGE


def paged_attention(
    q: Tensor, pages: KVPages | Int8Pages, batch: Paged, scale: float, window: int | None = None, softcap: float = 0.0
) -> Tensor:
    ends = batch.starts.tolist()
    parts = []
    for s, (a, b) in enumerate(pairwise(ends)):
        first, last = int(batch.positions[a]), int(batch.positions[b - 1])
        table = batch.page_table[s, : last // PAGE + 1].long()
        if isinstance(pages, Int8Pages):
            k, v = int8_pages.read(pages, table, last + 1, q.dtype)
        else:
            k = pages.k[table].permute(0, 3, 1, 2).flatten(0, 1)[: last + 1]
            v = pages.v[table].transpose(1, 2).flatten(0, 1)[: last + 1]
        parts.append(attend(q[a:b], k, v, first, scale, window, softcap))
    return torch.cat(parts)


def log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, dim=-1)


def select_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.log_softmax(logits, dim=-1).gather(-1, tokens.long()[:, None])[:, 0]


def softcap(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, z_loss: float = 0.0, softcap: float = 0.0,
    entropy: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = linear(hidden, weight).to(wide)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_z = torch.logsumexp(logits, dim=-1)
    kept = targets >= 0
    chosen = logits.gather(-1, targets.clamp(min=0).long()[:, None])[:, 0]
    loss = ((log_z - chosen + z_loss * log_z.square()) * token_weights)[kept].sum()
    logprobs = (chosen - log_z).detach()
    if not entropy:
        return loss, logprobs
    return loss, logprobs, torch.special.entr(logits.detach().softmax(-1)).sum(-1)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, f: AdamWFactors) -> None:
    """In chunks, so that the four streams stay in the second-level cache from one operation to the next.

    The root is taken in float64 and rounded: PyTorch's float32 root (MKL's) is not always correctly rounded.
    """
    streams = (t.detach().view(-1).split(SQUARE_BLOCK) for t in (p, m, v))
    for weight, first, second, gradient in zip(*streams, g.reshape(-1).split(SQUARE_BLOCK), strict=True):
        scaled = gradient if f.scale == 1.0 else gradient * f.scale
        first.mul_(f.beta1).add_(scaled * f.rest1)
        second.mul_(f.beta2).add_((scaled * scaled).mul_(f.rest2))
        if f.keep != 1.0:
            weight.mul_(f.keep)
        weight.sub_((first * f.lr).div_(second.double().sqrt().to(second.dtype).mul_(f.root).add_(f.eps)))


def square_sum(x: Tensor) -> Tensor:
    blocks = x.detach().reshape(-1).double().split(SQUARE_BLOCK)
    return tree_sum(torch.stack([tree_sum(block * block) for block in blocks]))


def dequantize(blocks: Tensor, name: str, out: Tensor) -> None:
    """By the `gguf` package. It works through 16 rows at a time: wide ones keep it busy."""
    from gguf import GGMLQuantizationType, dequantize

    size = FORMATS[name].size
    whole = len(blocks) // (256 * size) * (256 * size)
    parts = [blocks[:whole].view(-1, 256 * size), blocks[whole:].view(1, -1)]
    values = [torch.from_numpy(dequantize(part.numpy(), GGMLQuantizationType[name])) for part in parts if part.numel()]
    out.view(-1).copy_(torch.cat([value.view(-1) for value in values]))
