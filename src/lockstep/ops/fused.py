"""Chains of operators as one, each with the bits of the chain: a fusion rounds where the operators round.

What a compiler's passes replace by what (raw operators; `x'` is a result that only the backward reads). Weights are
already rounded to the compute dtype, packed where a product reads them:

| chain | one operator |
|---|---|
| `gate' = gemm(a, G, n, None, dtype); up' = gemm(a, U, n, None, dtype); y = gated(gate', up', code)` | `y, gate', up' = gemm_gated(a, G, U, n, code, keep)` |
| `before' = gemm(a, W, n, bias, dtype); y = activation(before', code)` | `y, before' = gemm_activation(a, W, n, bias, code, keep)` |
| `q = gemm(a, Q, n0, b0, dtype); k = gemm(a, K, n1, b1, dtype); v = gemm(a, V, n2, b2, dtype)` | `q, k, v = gemm_three(a, Q, K, V, n0, n1, n2, b0, b1, b2)` |
| `h = gemm(a, W, n, None, dtype); sum = aten.add(x float32, h)` | `sum = gemm_add(x, a, W)` |
| `sum = aten.add(x float32, h); y, rstd' = rms_norm(sum, w, eps, offset)` | `sum, y, rstd' = add_rms_norm(x, h, w, eps, offset)` |
| `dn, dw = rms_norm_backward(dy, sum, w, rstd, offset); dx = aten.add(d_sum, dn); dh = dx.to(dtype)` | `dx, dh, dw = add_rms_norm_backward(dy, d_sum, sum, w, rstd, offset)` |
| `sum = aten.add(x float32, h); y, mean', rstd' = layer_norm(sum, w, b, eps)` | `sum, y, mean', rstd' = add_layer_norm(x, h, w, b, eps)` |
| `dn, dw, db = layer_norm_backward(dy, sum, w, mean, rstd); dx = aten.add(d_sum, dn); dh = dx.to(dtype)` | `dx, dh, dw, db = add_layer_norm_backward(dy, d_sum, sum, w, mean, rstd)` |
| `n, rstd' = rms_norm(x [T, H, d], w, eps, offset); y = rope(n, positions, table, 1.0)` | `y, rstd' = norm_rope(x, w, positions, table, eps, offset)` |
| `t = rope(k, positions, rotary, 1.0); write_kv(t, v, k_pages, v_pages, table, starts, positions)` | `rope_write_kv(k, v, rotary, k_pages, v_pages, table, starts, positions)` |

`keep` False (inference) leaves the primed products empty. The other backwards stay the chain's own (`gated_backward`,
`activation_backward`, `rope` with sign -1 and `rms_norm_backward`): the fused forwards give what those read, and `n` of
the norm before a rotation is not among it. `scaled(x, s, dtype)` with s known to be one, as in the gradient of a whole
step's loss, is `x.to(dtype)`: x * 1 = x for every float.

The functions below are the same chains for eager code, with gradients.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from lockstep.ops.batch import KVPages, Paged
from lockstep.ops.first_order import first_order
from lockstep.ops.gated import code_of
from lockstep.ops.linear import PackedWeight, expect_alike, input_gradient, lay_out, refuse_gradient, weight_gradient
from lockstep.ops.raw import kernel


def linear_gated(x: Tensor, gate: Tensor | PackedWeight, up: Tensor | PackedWeight, activation: str) -> Tensor:
    """`gated(linear(x, gate), linear(x, up), activation)`: x [T, K], both weights [F, K] or both packed -> [T, F]."""
    expect_alike("linear_gated", (gate, up))
    if isinstance(gate, PackedWeight) and isinstance(up, PackedWeight):
        refuse_gradient("a product with a packed weight", x)
        arguments = (x.contiguous(), gate.panels, up.panels, gate.n, code_of(activation), False)
        y: Tensor = kernel.gemm_gated(*arguments)[0]
        return y
    y = _LinearGated.apply(x, gate, up, code_of(activation))
    return y


def linear_activation(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """`activation(linear(x, weight, bias))`: x [T, K], weight [N, K] or packed -> [T, N]."""
    if isinstance(weight, PackedWeight):
        refuse_gradient("a product with a packed weight", x)
        rounded = None if bias is None else bias.to(x.dtype).contiguous()
        arguments = (x.contiguous(), weight.panels, weight.n, rounded, code_of(activation), False)
        y: Tensor = kernel.gemm_activation(*arguments)[0]
        return y
    y = _LinearActivation.apply(x, weight, bias, code_of(activation))
    return y


def add_rms_norm(x: Tensor, h: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """x float32 + h (shape [..., D], in the compute dtype) -> the sum float32, and its RMS norm in h's dtype."""
    total, y = _AddRMSNorm.apply(x, h, weight, eps, offset)
    return total, y


def add_layer_norm(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x float32 + h (shape [..., D], in the compute dtype) -> the sum float32, and its layer norm in h's dtype."""
    total, y = _AddLayerNorm.apply(x, h, weight, bias, eps)
    return total, y


def norm_rope(x: Tensor, weight: Tensor, positions: Tensor, table: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rope(rms_norm(x, weight, eps, offset), positions, table)`: x [T, H, d], a norm per head."""
    refuse_gradient("a rotary table", table)
    y: Tensor = _NormRope.apply(x, weight, positions, table, eps, offset)
    return y


def rope_write_kv(k: Tensor, v: Tensor, table: Tensor, pages: KVPages, batch: Paged) -> None:
    """`write_kv(rope(k, batch.positions, table), v, pages, batch)`; without gradient."""
    refuse_gradient("writing keys", k)
    kernel.rope_write_kv(
        k.contiguous(), v.contiguous(), table, pages.k, pages.v, batch.page_table, batch.starts, batch.positions
    )


@first_order
class _LinearGated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, code: int) -> Tensor:
        x = x.contiguous()
        panels = lay_out(gate, x.dtype).panels, lay_out(up, x.dtype).panels
        y, gates, ups = kernel.gemm_gated(x, *panels, gate.shape[0], code, True)
        ctx.save_for_backward(x, gate, up, gates, ups)
        ctx.code = code
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, gates, ups = ctx.saved_tensors
        d_gates, d_ups = kernel.gated_backward(grads[0].contiguous(), gates, ups, ctx.code)
        need_x, need_gate, need_up, _ = ctx.needs_input_grad
        # Autograd adds the gradient of the later product (up) first; the sum of two is the same either way.
        dx = input_gradient(d_ups, up) + input_gradient(d_gates, gate) if need_x else None
        d_gate = weight_gradient(d_gates, x).to(gate.dtype) if need_gate else None
        d_up = weight_gradient(d_ups, x).to(up.dtype) if need_up else None
        return dx, d_gate, d_up, None


@first_order
class _LinearActivation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, code: int) -> Tensor:
        x = x.contiguous()
        rounded = None if bias is None else bias.to(x.dtype).contiguous()
        packed = lay_out(weight, x.dtype)
        y, before = kernel.gemm_activation(x, packed.panels, packed.n, rounded, code, True)
        ctx.save_for_backward(x, weight, before)
        ctx.code, ctx.bias_dtype = code, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        d = kernel.activation_backward(grads[0].contiguous(), before, ctx.code)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = input_gradient(d, weight) if need_x else None
        dw = weight_gradient(d, x).to(weight.dtype) if need_weight else None
        db = kernel.column_sums(d).to(ctx.bias_dtype) if need_bias else None
        return dx, dw, db, None


@first_order
class _AddRMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        rounded = weight.to(h.dtype).contiguous()
        total, y, rstd = kernel.add_rms_norm(x.contiguous(), h.contiguous(), rounded, eps, offset)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        d_total, dy = grads[0].contiguous(), grads[1].contiguous()
        rounded = weight.to(dy.dtype).contiguous()
        dx, dh, dw = kernel.add_rms_norm_backward(dy, d_total, total, rounded, rstd, ctx.offset)
        return dx, dh, dw.to(weight.dtype), None, None


@first_order
class _AddLayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        rounded = [None if w is None else w.to(h.dtype).contiguous() for w in (weight, bias)]
        total, y, mean, rstd = kernel.add_layer_norm(x.contiguous(), h.contiguous(), *rounded, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        d_total, dy = grads[0].contiguous(), grads[1].contiguous()
        rounded = weight.to(dy.dtype).contiguous()
        dx, dh, dw, db = kernel.add_layer_norm_backward(dy, d_total, total, rounded, mean, rstd)
        return dx, dh, dw.to(weight.dtype), None if ctx.bias_dtype is None else db.to(ctx.bias_dtype), None


@first_order
class _NormRope(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, positions: Tensor, table: Tensor, eps: float, offset: float
    ) -> Tensor:
        x = x.contiguous()
        y, rstd = kernel.norm_rope(x, weight.to(x.dtype).contiguous(), positions, table, eps, offset)
        ctx.save_for_backward(x, weight, rstd, positions, table)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd, positions, table = ctx.saved_tensors
        dn = kernel.rope(grads[0].contiguous(), positions, table, -1.0)
        dx, dw = kernel.rms_norm_backward(dn, x, weight.to(x.dtype).contiguous(), rstd, ctx.offset)
        return dx, dw.to(weight.dtype), None, None, None, None
