"""FLOPs and bytes of operators, against the trainer's own count for a whole step and against counts by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config.model import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.ops import Packed, operators
from lockstep.ops.costs import Cost, cost
from lockstep.train.flops import matrix_weights

CONFIG = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=128,
)  # fmt: skip
ROWS = 40
RAW = torch.ops.lockstep


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.costs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.costs[func._schema.name] += cost(func, args, kwargs or {}, result).flops
        return result


def test_a_step_costs_what_the_trainer_counts_without_allocating_anything() -> None:
    ops, decoder = operators("bitwise", kernels=False), Decoder(CONFIG)
    tokens = torch.empty(ROWS, dtype=torch.int64, device="meta")
    batch = Packed(*(torch.empty(n, dtype=torch.int32, device="meta") for n in (ROWS, 2)))
    with _Count() as count:
        hidden = decoder(ops, tokens, batch)
        loss, _ = ops.linear_cross_entropy(hidden, decoder.head_weight, tokens, torch.empty(ROWS, device="meta"))
        loss.backward()
    products = sum(count.costs[f"lockstep::{name}"] for name in ("gemm", "gemm_transposed", "linear_cross_entropy"))
    assert products == 3 * 2 * matrix_weights(decoder) * ROWS
    pairs = ROWS * (ROWS + 1) / 2
    forward = 4 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * pairs
    assert count.costs["lockstep::attention_packed"] == forward
    assert count.costs["lockstep::attention_backward"] == 2.5 * forward


def one(operator: Any, *args: Any) -> Cost:
    return cost(operator, args, {}, operator(*args))


def test_known_lengths_and_windows_narrow_attention() -> None:
    operators("bitwise")
    batch = Packed.of([3, 5])
    q = torch.randn(8, 2, 16)
    operator = RAW.attention_packed.default
    assert one(operator, q, q, q, batch.starts, batch.positions, 1.0, 0, 0.0).flops == 4 * 2 * 16 * (6 + 15)
    assert one(operator, q, q, q, batch.starts, batch.positions, 1.0, 2, 0.0).flops == 4 * 2 * 16 * (5 + 9)


def test_bytes_count_every_tensor_once_and_rows_only_where_rows_are_read() -> None:
    operators("bitwise")
    a, packed = torch.randn(7, 5), RAW.pack_rows(torch.randn(5, 20), torch.float32)
    assert one(RAW.gemm.default, a, packed, 20, None, torch.float32) == Cost(2 * 7 * 5 * 20, 4 * (35 + 160), 4 * 140)
    tokens, weight = torch.tensor([1, 2]), torch.randn(1000, 8)
    found = one(RAW.embedding.default, tokens, weight, torch.bfloat16, 1.0, 0, 1000)
    assert (found.read, found.written) == (2 * 8 + 2 * 8 * 4, 2 * 8 * 2)
    assert one(torch.ops.aten.add_.Tensor, torch.randn(4), torch.randn(4)) == Cost(4, 32, 16)


def test_fused_operators_cost_the_operations_of_their_parts() -> None:
    operators("bitwise")
    a, packed = torch.randn(7, 5), RAW.pack_rows(torch.randn(5, 20), torch.float32)
    product = one(RAW.gemm.default, a, packed, 20, None, torch.float32)
    y = torch.randn(7, 20)
    gate = one(RAW.gated.default, y, y, 0)
    fused = one(RAW.gemm_gated.default, a, packed, packed, 20, 0, False)
    assert fused.flops == 2 * product.flops + gate.flops
    assert fused.bytes < 2 * product.bytes + gate.bytes


def test_views_and_empty_memory_cost_nothing() -> None:
    x = torch.randn(4, 4)
    assert one(torch.ops.aten.view.default, x, [16]) == Cost()
    assert one(torch.ops.aten.t.default, x) == Cost()
    assert one(torch.ops.aten.empty.memory_format, [4]) == Cost()


def test_other_products_cost_what_pytorch_counts() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with FlopCounterMode(display=False) as theirs:
        a @ b
    assert one(torch.ops.aten.mm.default, a, b).flops == theirs.get_total_flops()


def test_every_raw_operator_has_a_cost() -> None:
    from tests.ops.test_raw import CASES

    operators("bitwise")
    for name, case in CASES.items():
        arguments = case()
        operator = getattr(RAW, name).default
        found = cost(operator, arguments, {}, operator(*arguments))
        assert found.bytes > 0, name
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        assert found.read <= sum(x.numel() * x.element_size() for x in tensors), name
