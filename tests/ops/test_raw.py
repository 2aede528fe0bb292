"""The raw operators: shapes on fake tensors, `.out` with the functional form's bytes, errors, capture, dry runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.config.model import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.init import random_decoder
from lockstep.ops import PAGE, Packed, operators
from tests.ops.compare import differing, randn
from tests.ops.dry_run import dry_run
from tests.processes import answer

operators("bitwise")
RAW = torch.ops.lockstep
BF16, F32 = torch.bfloat16, torch.float32
BATCH = Packed.of([5, 4])


def half(seed: int, *shape: int) -> Tensor:
    return randn(seed, *shape, dtype=BF16)


def packed(seed: int, k: int, n: int) -> Tensor:
    return torch.ops.lockstep.pack_rows(half(seed, k, n), BF16)


def attention_backward() -> tuple[Any, ...]:
    q, k, v = half(0, 9, 4, 16), half(1, 9, 2, 16), half(2, 9, 2, 32)
    out, lse = RAW.attention_packed(q, k, v, BATCH.starts, BATCH.positions, 0.3, 0, 0.0)
    return half(3, 9, 4, 32), q, k, v, out, lse, BATCH.starts, BATCH.positions, 0.3, 0, 0.0


def pages() -> tuple[Tensor, Tensor]:
    return half(4, 3, 2, 16, PAGE), half(5, 3, 2, PAGE, 32)


def int8_pages() -> tuple[Tensor, ...]:
    k, v = (torch.arange(x.numel()).mul(37).remainder(255).sub(127).view(x.shape).to(torch.int8) for x in pages())
    return k, v, randn(6, 3, 2, PAGE).abs(), randn(7, 3, 2, PAGE).abs()


def routes() -> tuple[Tensor, ...]:
    """chosen [7, 3] of 12 experts, offsets, rows, slots."""
    chosen = RAW.route(randn(9, 7, 12), None, 3, False, True, 1, 1, False, 1.0)[1]
    return chosen, *RAW.group(chosen, 12)


TABLE = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "pack_columns": lambda: (randn(0, 20, 5), BF16),
    "pack_rows": lambda: (randn(0, 5, 20), BF16),
    "gemm": lambda: (half(0, 7, 5), packed(1, 5, 20), 20, half(2, 20), F32),
    "gemm_transposed": lambda: (half(0, 5, 7), packed(1, 5, 20), 20),
    "gemm_transposed_add": lambda: (half(0, 5, 7), packed(1, 5, 20), randn(2, 7, 20)),
    "column_sums": lambda: (half(0, 7, 20),),
    "write_kv": lambda: (half(0, 9, 2, 16), half(1, 9, 2, 32), *pages(), TABLE, BATCH.starts, BATCH.positions),
    "attention_paged": lambda: (half(0, 9, 4, 16), *pages(), TABLE, BATCH.starts, BATCH.positions, 0.3, 3, 5.0),
    "write_kv_int8": lambda: (
        half(0, 9, 2, 16), half(1, 9, 2, 32), *int8_pages(), TABLE, BATCH.starts, BATCH.positions,
    ),
    "attention_paged_int8": lambda: (
        half(0, 9, 4, 16), *int8_pages(), TABLE, BATCH.starts, BATCH.positions, 0.3, 3, 5.0,
    ),
    "attention_packed": lambda: (
        half(0, 9, 4, 16), half(1, 9, 2, 16), half(2, 9, 2, 32), BATCH.starts, BATCH.positions, 0.3, 3, 5.0,
    ),
    "attention_backward": attention_backward,
    "write_latents": lambda: (half(0, 9, 48), half(1, 3, PAGE, 48), TABLE, BATCH.starts, BATCH.positions),
    "attention_latent": lambda: (
        half(0, 9, 4, 48), half(1, 3, PAGE, 48), TABLE, BATCH.starts, BATCH.positions, 32, 0.3,
    ),
    "route": lambda: (randn(0, 7, 12), randn(1, 12), 3, True, True, 4, 2, True, 2.5),
    "route_backward": lambda: (randn(0, 7, 3), randn(1, 7, 12), routes()[0], False, True, 1.0),
    "softmax_sums": lambda: (randn(0, 7, 12),),
    "softmax_sums_backward": lambda: (randn(0, 12), randn(1, 7, 12)),
    "balance_share": lambda: ([routes()[1], routes()[1]], 14),
    "group": lambda: (routes()[0], 12),
    "dispatch": lambda: (half(0, 7, 20), routes()[2]),
    "dispatch_backward": lambda: (half(0, 21, 20), routes()[3]),
    "combine": lambda: (half(0, 21, 20), randn(1, 7, 3), routes()[3]),
    "combine_backward": lambda: (half(0, 7, 20), half(1, 21, 20), randn(2, 7, 3), routes()[3]),
    "grouped_gemm": lambda: (half(0, 21, 5), routes()[1], [packed(e, 5, 20) for e in range(12)], 20),
    "grouped_product": lambda: (half(0, 21, 5), routes()[1], [randn(e, 20, 5) for e in range(12)], False),
    "grouped_gated": lambda: (
        half(0, 21, 5), routes()[1], *([packed(e + at, 5, 20) for e in range(12)] for at in (0, 12)), 20, 1, True,
    ),
    "grouped_gated_product": lambda: (
        half(0, 21, 5), routes()[1], *([randn(e + at, 20, 5) for e in range(12)] for at in (0, 12)), 0, True,
    ),
    "grouped_weight_gradient": lambda: (half(0, 21, 20), half(1, 21, 5), routes()[1]),
    "rms_norm": lambda: (randn(0, 7, 3, 20), half(1, 20), 1e-5, 1.0),
    "rms_norm_backward": lambda: (half(0, 7, 20), randn(1, 7, 20), half(2, 20), randn(3, 7), 1.0),
    "rms_norm_weight_gradient": lambda: (half(0, 7, 20), randn(1, 7, 20), randn(2, 7), randn(3, 20)),
    "add_rms_norm": lambda: (randn(0, 7, 20), half(1, 7, 20), half(2, 20), 1e-5, 1.0),
    "add_rms_norm_backward": lambda: (
        half(0, 7, 20), randn(1, 7, 20), randn(2, 7, 20), half(3, 20), randn(4, 7), 1.0,
    ),
    "layer_norm": lambda: (randn(0, 7, 3, 20), half(1, 20), half(2, 20), 1e-5),
    "layer_norm_backward": lambda: (half(0, 7, 20), randn(1, 7, 20), half(2, 20), randn(3, 7), randn(4, 7)),
    "add_layer_norm": lambda: (randn(0, 7, 20), half(1, 7, 20), half(2, 20), None, 1e-5),
    "add_layer_norm_backward": lambda: (
        half(0, 7, 20), randn(1, 7, 20), randn(2, 7, 20), half(3, 20), randn(4, 7), randn(5, 7),
    ),
    "gemm_gated": lambda: (half(0, 7, 5), packed(1, 5, 20), packed(2, 5, 20), 20, 0, True),
    "gemm_activation": lambda: (half(0, 7, 5), packed(1, 5, 20), 20, half(2, 20), 1, True),
    "gemm_three": lambda: (
        half(0, 7, 5), packed(1, 5, 20), packed(2, 5, 3), packed(3, 5, 37), 20, 3, 37, half(4, 20), None, half(5, 37),
    ),
    "gemm_add": lambda: (randn(0, 7, 20), half(1, 7, 5), packed(2, 5, 20)),
    "norm_rope": lambda: (half(0, 9, 2, 16), half(1, 16), BATCH.positions, randn(2, 5, 8, 2), 1e-5, 0.0),
    "rope_write_kv": lambda: (
        half(0, 9, 2, 16), half(1, 9, 2, 32), randn(2, 5, 8, 2), *pages(), TABLE, BATCH.starts, BATCH.positions,
    ),
    "activation": lambda: (half(0, 7, 20), 0),
    "activation_backward": lambda: (half(0, 7, 20), half(1, 7, 20), 1),
    "rope": lambda: (half(0, 9, 2, 16), BATCH.positions, randn(1, 5, 8, 2), -1.0),
    "gated": lambda: (half(0, 7, 20), half(1, 7, 20), 0),
    "gated_backward": lambda: (half(0, 7, 20), half(1, 7, 20), half(2, 7, 20), 1),
    "share_heads": lambda: (half(0, 7, 20), 3),
    "share_heads_backward": lambda: (half(0, 7, 3, 20),),
    "embedding": lambda: (torch.tensor([3, 0, 3]), randn(0, 2, 20), BF16, 1.5, 2, 5),
    "embedding_backward": lambda: (half(0, 3, 20), torch.tensor([3, 0, 3]), 2, 1.5, BF16, 2),
    "log_sum_exp": lambda: (randn(0, 7, 20), 3),
    "entropies": lambda: (randn(0, 7, 20), randn(1, 7), 3),
    "cross_entropy_backward": lambda: (
        randn(0, 3, 20), randn(1, 3), torch.tensor([-1, 25, 3]), randn(2, 3), 0.1, 5.0, 10, BF16,
    ),
    "log_softmax": lambda: (randn(0, 7, 20),),
    "softcap": lambda: (randn(0, 7, 20), 0.7),
    "linear_cross_entropy": lambda: (
        half(0, 3, 20), randn(1, 50, 20), torch.tensor([-1, 49, 3]), randn(2, 3), 0.1, 5.0, True, True, True,
    ),
    "scaled": lambda: (randn(0, 7, 20), torch.tensor(0.3), BF16),
    "adamw": lambda: (randn(0, 9), randn(1, 9), randn(2, 9), randn(3, 9).abs(), *[0.5] * 9),
    "square_sum": lambda: (randn(0, 70_000),),
    "dequantize": lambda: (torch.zeros(68, dtype=torch.uint8), 8, 34, 32, randn(0, 64)),
}  # fmt: skip
IN_PLACE = {
    "gemm_transposed_add", "write_kv", "write_kv_int8", "write_latents", "rope_write_kv", "adamw", "dequantize",
}  # fmt: skip
SCRATCH = {"linear_cross_entropy": 5}
"""The result whose bytes mean nothing: what the operator worked in."""


def names() -> set[str]:
    return {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("lockstep::")}


def results(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def test_every_operator_has_a_case() -> None:
    functional = {name for name in names() if "." not in name}
    assert functional == set(CASES)
    assert {name for name in names() if "." in name} == {f"{name}.out" for name in functional - IN_PLACE}


@pytest.mark.parametrize("name", CASES)
def test_schema_and_shapes(name: str) -> None:
    """What is mutated and what aliases is as the schema says; fake results have the real ones' shapes and dtypes."""
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(RAW, name).default, CASES[name](), test_utils=checks)


@pytest.mark.parametrize("name", sorted(set(CASES) - IN_PLACE))
def test_out_gives_the_same_bytes(name: str) -> None:
    operator = getattr(RAW, name)
    expected = results(operator(*CASES[name]()))
    outs = [torch.full_like(x, 77) for x in expected]
    names = ["out"] if len(outs) == 1 else [f"out{i}" for i in range(len(outs))]
    given = results(operator.out(*CASES[name](), **dict(zip(names, outs, strict=True))))
    for i, (out, returned, right) in enumerate(zip(outs, given, expected, strict=True)):
        assert out.data_ptr() == returned.data_ptr()
        assert SCRATCH.get(name) == i or differing(out, right) == 0
    wrong = [x.new_empty(*x.shape, 2) for x in expected]
    for arguments in (CASES[name](), [x.to("meta") if isinstance(x, Tensor) else x for x in CASES[name]()]):
        device = "meta" if any(isinstance(x, Tensor) and x.is_meta for x in arguments) else "cpu"
        with pytest.raises((RuntimeError, ValueError), match=r"out0?: expected"):
            operator.out(*arguments, **{n: x.to(device) for n, x in zip(names, wrong, strict=True)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RAW.gemm(randn(0, 7, 6), packed(1, 5, 20), 20, None, F32), r"product of \[7, 6\] with packed \[2, 5"),
        (lambda: RAW.gemm(randn(0, 7, 5), packed(1, 5, 20), 20, None, F32), "packed is bfloat16: expected float32"),
        (lambda: RAW.rope(half(0, 9, 2, 16), BATCH.positions, randn(1, 4, 8, 2), 1.0), "position 4 is not in the"),
        (
            lambda: RAW.embedding(torch.tensor([5]), randn(0, 5, 20), BF16, 1.0, 0, 5),
            "token 5 is not in the vocabulary of 5",
        ),
        (lambda: RAW.gated(half(0, 7, 20), half(1, 7, 21), 0), r"up: expected \[7, 20\], got \[7, 21\]"),
        (lambda: RAW.column_sums(half(0, 7, 20).T), "contiguous"),
    ],
)
def test_errors_are_told(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()


CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    max_positions=32768, qk_norm=True, qkv_bias=True,
)  # fmt: skip


def gradients(decoder: Decoder, dtype: torch.dtype) -> Callable[..., tuple[Tensor, ...]]:
    """The loss and the gradient of every parameter as a function of tensors alone."""
    ops = operators("bitwise", kernels=False)

    def step(parameters: dict[str, Tensor], tokens: Tensor, batch: tuple[Tensor, Tensor], table: Tensor) -> Any:
        def run(*_: Any) -> tuple[Tensor, Tensor]:
            hidden = decoder(ops, tokens, Packed(*batch), dtype=dtype, rope=(table, table))
            weights = torch.ones_like(tokens, dtype=torch.float32)
            loss, logprobs = ops.linear_cross_entropy(hidden, decoder.head_weight, tokens, weights)
            return loss, logprobs

        with torch.nn.utils.stateless._reparametrize_module(decoder, parameters):
            loss, logprobs = run()
            return loss, logprobs, *torch.autograd.grad(loss, list(parameters.values()))

    return step


WITH_EXPERTS = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, kv_lora_rank=16, q_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, num_experts=4, experts_per_token=2, shared_experts=1,
    dense_layers=1, rope_interleaved=True,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("config", [CONFIG, WITH_EXPERTS], ids=["dense", "experts and latents"])
def test_a_captured_step_gives_the_bytes_of_the_step(config: ModelConfig, dtype: torch.dtype) -> None:
    """Forward and backward of a decoder, captured on fake tensors, replayed on real ones."""
    decoder = random_decoder(config, 0)
    parameters, tokens = dict(decoder.named_parameters()), torch.arange(9) * 7 % 64
    batch = (BATCH.positions, BATCH.starts)
    table = decoder.rope_tables(BATCH)[0]
    step = gradients(decoder, dtype)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(p).requires_grad_() for name, p in parameters.items()}
        inputs = (fake, mode.from_tensor(tokens), tuple(map(mode.from_tensor, batch)), mode.from_tensor(table))
        graph = make_fx(step)(*inputs)
    called = {str(node.target) for node in graph.graph.nodes}
    assert "lockstep.attention_backward.default" in called
    assert "lockstep.linear_cross_entropy.default" in called
    expected = step(parameters, tokens, batch, table)
    replayed = graph(parameters, tokens, batch, table)
    assert [differing(a, b) for a, b in zip(replayed, expected, strict=True)] == [0] * len(expected)


def test_a_dry_run_needs_neither_compiler_nor_memory(tmp_path: Path) -> None:
    """Two layers of a 70B model, 8192 tokens, forward and backward on meta tensors."""
    assert answer(dry_run, tmp_path) == ((8192, 8192), torch.bfloat16, "meta")
