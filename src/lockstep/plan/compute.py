"""Compute time of a layer and of the head on one device, from FLOPs, bytes and the shapes of the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.plan.cluster import Device
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.columns import Column, Columns

_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
"""Output tiles of matrix kernels and their efficiency against the largest; a library takes the best for a shape."""
_KERNELS_FORWARD, _KERNELS_BACKWARD = 26, 48
"""Kernels that a framework launches for a layer."""
_FLASH_FORWARD, _FLASH_BACKWARD = 0.65, 0.5
"""Fraction of the matrix efficiency that fused attention reaches (arXiv 2307.08691, figure 5, on A100)."""
_RING = 1.1
"""Context parallelism runs attention in smaller blocks and merges partial results: an estimate."""
_HEAD_BYTES = 60.0
"""Memory traffic of float32 logits, softmax, loss and their backward, per logit: about 15 passes."""
_SCORES_FORWARD, _SCORES_BACKWARD = 13.0, 19.0
"""Traffic per score where attention is not fused: written and read by product, mask + softmax, dropout, product."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch, shape ``[rows]`` each, without communication.

    ``again``: what recomputation adds to the backward. ``host``: what the host needs to launch all of it.
    ``attention``: the forward attention core alone (it hides the ring exchange of context parallelism).
    """

    forward: Column
    again: Column
    input_gradient: Column
    weight_gradient: Column
    host: Column
    attention: Column

    @property
    def device(self) -> Column:
        return self.forward + self.again + self.input_gradient + self.weight_gradient


def layer_time(rows: Columns, device: Device, factors: Coefficients, dtype: str = "bf16") -> LayerTime:
    """Time of one average layer (dense and expert layers weighted by their number)."""
    machine = _Machine(device, factors, dtype)
    forward, dgrad, wgrad = _products(rows, machine)
    core, core_again = _attention(rows, machine)
    light, light_back = _elementwise(rows, machine)
    full, selective = rows.full, (1 - rows.full) * (rows.recompute == 1)
    again = full * (forward + core + light) + selective * core
    kernels = _KERNELS_FORWARD * (1 + full) + _KERNELS_BACKWARD + 6 * selective
    return LayerTime(
        forward=forward + core + light,
        again=again,
        input_gradient=dgrad + core_again + light_back,
        weight_gradient=wgrad,
        host=kernels * device.launch_us * 1e-6 * factors.launch,
        attention=core,
    )


def head_time(rows: Columns, device: Device, factors: Coefficients, dtype: str = "bf16") -> Column:
    """Seconds of the output head, loss and embedding for one micro-batch, forward and backward, shape ``[rows]``."""
    machine = _Machine(device, factors, dtype)
    product = 3 * machine.product(rows.head_tokens, rows.vocab / rows.tp, rows.hidden)
    logits = rows.head_tokens * rows.vocab / rows.tp * _HEAD_BYTES * factors.head
    return product + machine.stream(logits + rows.head_tokens * rows.hidden * 20)


def stream_time(size: Column, device: Device, factors: Coefficients) -> Column:
    """Seconds to move ``size`` bytes through device memory."""
    return _Machine(device, factors, "bf16").stream(size)


@dataclass(frozen=True)
class _Machine:
    device: Device
    factors: Coefficients
    dtype: str

    @property
    def ceiling(self) -> float:
        """The most that a product reaches of the described rate: all of it, unless that rate was measured itself."""
        return 1.0 if self.device.matrix_efficiency < 1 else float("inf")

    def product(self, m: Any, n: Any, k: Any, count: Any = 1.0) -> Column:
        """Seconds of ``count`` products [m, k] x [k, n]: whole waves of tiles, slower for a short inner dimension."""
        cores, best = self.device.cores, np.inf
        for a, b, efficiency in _TILES:
            for height, width in {(a, b), (b, a)}:
                tiles = np.ceil(m / height) * np.ceil(n / width) * count
                padded = np.ceil(tiles / cores) * cores * height * width * 2.0 * k / efficiency
                best = np.minimum(best, padded)
        reached = self.device.matrix_efficiency * self.factors.matrix
        rate = self.device.matrix_tflops[self.dtype] * 1e12 * np.minimum(reached, self.ceiling)
        seconds: Column = best * (1 + self.device.half_k * self.factors.half_k / k) / rate
        return seconds

    def flops(self, amount: Column, efficiency: float) -> Column:
        reached = min(self.device.matrix_efficiency * self.factors.matrix, self.ceiling) * efficiency
        return amount / (self.device.matrix_tflops[self.dtype] * 1e12 * reached)

    def stream(self, size: Column) -> Column:
        return size / (self.device.memory_gb_s * 1e9 * self.device.memory_efficiency * self.factors.memory)


def _products(rows: Columns, machine: _Machine) -> tuple[Column, Column, Column]:
    """Forward, input gradient and weight gradient of all linear layers of one layer."""
    tokens, hidden, tp = rows.tokens, rows.hidden, rows.tp
    up = (rows.matrices - 1) * rows.intermediate / tp
    total = _projections(rows, machine) + _linear(tokens, hidden, rows.core / tp, machine)
    dense = _linear(tokens, up, hidden, machine) + _linear(tokens, hidden, rows.intermediate / tp, machine)
    if not rows.moe.any():
        forward, dgrad, wgrad = total + dense
        return forward, dgrad, wgrad
    experts = np.maximum(rows.experts, 1)
    routed = np.maximum(1.0, tokens * rows.ep * rows.experts_per_token / experts)
    local, narrow = np.maximum(1.0, experts / rows.ep), np.maximum(1.0, rows.expert_intermediate / tp)
    sparse = _linear(routed, (rows.matrices - 1) * narrow, hidden, machine, local)
    sparse = sparse + _linear(routed, hidden, narrow, machine, local) + _linear(tokens, experts, hidden, machine)
    shared = np.maximum(1.0, rows.shared_intermediate / tp)
    both = _linear(tokens, (rows.matrices - 1) * shared, hidden, machine) + _linear(tokens, hidden, shared, machine)
    sparse = sparse + np.where(rows.shared_intermediate > 0, both, 0.0)
    forward, dgrad, wgrad = total + (1 - rows.moe) * dense + rows.moe * sparse
    return forward, dgrad, wgrad


def _projections(rows: Columns, machine: _Machine) -> Any:
    """[3, rows]: queries, keys and values, from the block's input or by way of the latents."""
    tokens, hidden, tp = rows.tokens, rows.hidden, rows.tp
    if not rows.kv_lora_rank.any():
        return _linear(tokens, (rows.query + rows.keys + rows.values) / tp, hidden, machine)
    inner = np.where(rows.q_lora_rank > 0, rows.q_lora_rank, hidden)
    up = rows.heads * rows.qk_nope_head_dim + rows.values
    found = _linear(tokens, rows.latent, hidden, machine) + _linear(tokens, rows.query / tp, inner, machine)
    return found + _linear(tokens, up / tp, rows.kv_lora_rank, machine)


def _linear(m: Any, n: Any, k: Any, machine: _Machine, count: Any = 1.0) -> Any:
    """[3, rows]: the product, its input gradient and its weight gradient."""
    return np.stack([machine.product(m, n, k, count), machine.product(m, k, n, count), machine.product(n, k, m, count)])


def _attention(rows: Columns, machine: _Machine) -> tuple[Column, Column]:
    """Forward and backward of the attention core."""
    width = rows.query + rows.core
    flops = 2.0 * rows.micro_batch * rows.seq * rows.seq * width / (rows.tp * rows.cp)
    flops = flops * np.where((rows.cp > 1) & ~rows.ours, _RING, 1.0)
    # Fused kernels skip what the causal mask hides; their backward recomputes the scores (5 products to 2).
    flash = machine.flops(flops / 2, _FLASH_FORWARD)
    flash_back = machine.flops(flops / 2 * 2.5, _FLASH_BACKWARD)
    if not rows.unfused.any():
        return flash, flash_back
    count = rows.micro_batch * rows.heads / rows.tp
    product = machine.product(rows.seq / rows.cp, rows.seq, rows.head_dim, count)
    product = product + machine.product(rows.seq / rows.cp, rows.value_dim, rows.seq, count)
    scores = count * rows.seq * rows.seq / rows.cp
    plain = product + machine.stream(scores * _SCORES_FORWARD)
    plain_back = 2 * product + machine.stream(scores * _SCORES_BACKWARD)
    unfused = rows.unfused > 0
    return np.where(unfused, plain, flash), np.where(unfused, plain_back, flash_back)


def _elementwise(rows: Columns, machine: _Machine) -> tuple[Column, Column]:
    """Norms, residuals, rotary or transposes, activation: bytes read and written, 16-bit, forward and backward."""
    whole = rows.tokens * rows.hidden / np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    experts = np.where(rows.experts > 0, rows.experts_per_token * rows.expert_intermediate, 0.0)
    middle = (1 - rows.moe) * rows.intermediate + rows.moe * (experts + rows.shared_intermediate)
    moved = 4 * (rows.query + rows.keys + rows.values) + 4 * rows.core + 4 * rows.latent * rows.tp
    # Norms and residual sums, 22 bytes for a 16-bit stream: six passes over it are wider where it is not.
    stream = 22 + 6 * (rows.residual_bytes - 2)
    forward = whole * stream + rows.tokens / rows.tp * (2 * rows.matrices * middle + moved)
    backward = whole * stream + rows.tokens / rows.tp * (3 * rows.matrices * middle + moved)
    return machine.stream(forward), machine.stream(backward)
