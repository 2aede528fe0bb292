"""The proof tool finds nothing where the contract holds, and finds and locates what breaks it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.model import Model
from lockstep.model.init import random_decoder
from lockstep.ops import operators
from lockstep.serve.bits import Place, prove

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=48, intermediate_size=80, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=256, sliding_window=40, layer_windows=(True, False), qk_norm=True,
)  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 6, "experts_per_token": 2, "expert_intermediate_size": 24, "shared_experts": 1, "dense_layers": 1,
}  # fmt: skip
LATENTS: dict[str, Any] = {
    "num_kv_heads": 4, "head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "sliding_window": None, "layer_windows": None, "qk_norm": False,
}  # fmt: skip
DEEPSEEK = {**EXPERTS, **LATENTS, "router_scoring": "sigmoid", "router_groups": 3, "router_top_groups": 2}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {}, "experts": EXPERTS, "experts and latents": DEEPSEEK, "absorbed": {**DEEPSEEK, "mla_form": "absorbed"},
}  # fmt: skip
SEQUENCES = [[(7 * i + s) % 64 for i in range(n)] for s, n in enumerate([5, 70, 1, 130])]


def model(dtype: torch.dtype, kind: str = "dense") -> Model:
    config = ModelConfig(**{**CONFIG.model_dump(), **KINDS[kind]})
    return Model(random_decoder(config, 0), None, operators("bitwise"), dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"), list(zip(KINDS, [torch.float32, torch.bfloat16] * 2, strict=True)), ids=list(KINDS)
)
def test_every_path_has_the_bits_of_the_training_forward(dtype: torch.dtype, kind: str) -> None:
    passes: list[tuple[int, int]] = []
    proofs = list(prove(model(dtype, kind), SEQUENCES, lambda *told: passes.append(told)))
    assert [done for done, _ in passes] == sorted(done for done, _ in passes)
    assert passes[-1] == (passes[0][1], passes[0][1])
    assert {p.path: p.differ for p in proofs if p.differ} == {}
    assert len(proofs) == 20
    assert all(p.compared for p in proofs)


def test_a_reordered_reduction_is_found_and_located() -> None:
    broken = model(torch.float32)
    whole = broken.ops.linear

    def reordered(x: Tensor, weight: object, *rest: object, **options: object) -> Tensor:
        """A product over half the depth twice, as a kernel that splits K by the number of rows would do it."""
        if len(x) < 3 or x.shape[1] != CONFIG.intermediate_size or not isinstance(weight, Tensor):
            return whole(x, weight, *rest, **options)
        half = x.shape[1] // 2
        return whole(x[:, :half], weight[:, :half]) + whole(x[:, half:], weight[:, half:])

    broken.ops = replace(broken.ops, linear=reordered, pack=lambda weight, dtype: weight)
    proofs = {p.path: p for p in prove(broken, SEQUENCES)}
    assert proofs["decode, one by one"].differ > 0
    assert proofs["decode, one by one"].place == Place("layers.0.mlp.down", "linear")
    assert proofs["training, packed first"].place in (None, Place("layers.0.mlp.down", "linear"))


@pytest.mark.parametrize("kind", ["experts", "absorbed"])
def test_a_product_that_depends_on_its_group_is_found(kind: str) -> None:
    """An expert's product over half the depth twice, where more than two rows share the expert (or the head)."""
    broken = model(torch.float32, kind)
    whole = broken.ops.grouped_linear

    def reordered(x: Tensor, weights: list[Tensor], offsets: Tensor) -> Tensor:
        if int(offsets.diff().max()) < 3 or not isinstance(weights[0], Tensor):
            return whole(x, weights, offsets)
        half = x.shape[1] // 2
        left, right = [w[:, :half].contiguous() for w in weights], [w[:, half:].contiguous() for w in weights]
        return whole(x[:, :half], left, offsets) + whole(x[:, half:], right, offsets)

    broken.ops = replace(broken.ops, grouped_linear=reordered, pack=lambda weight, dtype: weight)
    proofs = {p.path: p for p in prove(broken, SEQUENCES)}
    assert proofs["decode, one by one"].differ > 0
    expected = Place("layers.1.mlp", "combine") if kind == "experts" else Place("layers.0.attn", "attention")
    assert proofs["decode, one by one"].place == expected


SCRIPT = """
import sys
from lockstep.ops import build
build._COMMON.append("-DLOCKSTEP_TEST_REORDER")
from lockstep.cli.app import main
main(["eval", "bits", sys.argv[1], "--lengths", "9,70", "--dtype", "float32"])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_broken_kernel_fails_the_command_and_is_located(tmp_path: Path) -> None:
    """The real command on kernels built with one reduction reordered where a batch has more than one row.

    In float32: over 48 elements the two orders differ by a unit in the last place, which bfloat16 would round away.
    """
    llama = CONFIG.model_copy(update={"qk_norm": False, "sliding_window": None, "layer_windows": None})
    Model(random_decoder(llama, 0), None, operators("bitwise"), torch.float32).save(tmp_path / "model")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    line = next(line for line in run.stdout.splitlines() if "decode, one by one" in line)
    assert "layers.0.attn_norm: rms_norm" in line
