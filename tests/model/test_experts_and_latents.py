"""Models with experts and latent attention beyond their logits: a training step against `transformers`, the balance
loss, what is counted and refused, and the two forms of latent attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model import Decoder, Model, load, random_decoder
from lockstep.model.decoder import check_widths
from lockstep.model.families import FAMILIES, hf_names
from lockstep.model.lora import add_lora
from lockstep.ops import Packed, operators
from lockstep.train.data import Batch
from lockstep.train.flops import matrix_weights
from lockstep.train.memory import parameters
from lockstep.train.step import Compute, step_gradient
from tests.model.tiny import same_bytes, tiny

IDS = torch.randint(1, 96, (40,), generator=torch.Generator().manual_seed(3))
"""Without the padding token 0, whose embedding `transformers` does not train."""
WITH_EXPERTS = ["mixtral", "qwen3_moe", "qwen3_moe-normalised", "deepseek_v2", "deepseek_v3", "deepseek_v3-plain"]


def opened(name: str, path: Path, form: str = "expanded", **how: Any) -> tuple[Any, Model]:
    """The oracle, and our model of its directory."""
    oracle = tiny(name)
    oracle.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "mla_form": form}))
    return oracle, load(path, **{"dtype": "float32", **how})


def their_gradient(gradients: dict[str, Tensor], ours: str, theirs: str) -> Tensor:
    """Of one of our parameters: `transformers` keeps the experts of a layer in two tensors."""
    theirs = theirs.replace("block_sparse_moe", "mlp")
    if ".experts." not in ours:
        return gradients[theirs]
    head, _, tail = theirs.partition(".experts.")
    expert, kind = int(tail.split(".")[0]), ours.split(".")[-2]
    if kind == "down":
        return gradients[f"{head}.experts.down_proj"][expert]
    gate, up = gradients[f"{head}.experts.gate_up_proj"][expert].chunk(2)
    return gate if kind == "gate" else up


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_training_step_has_the_gradient_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    """Against float64; the balance loss is in it where the family has one."""
    if form == "absorbed" and not name.startswith("deepseek"):
        pytest.skip("this family has no latents")
    oracle, model = opened(name, tmp_path, form)
    oracle = oracle.double()
    oracle.config._experts_implementation = "eager"  # the other one has no float64
    balanced = bool(model.config.router_aux_loss)
    how = {"output_router_logits": True} if balanced else {}
    theirs = oracle(IDS[None], labels=IDS[None], **how)
    theirs.loss.backward()
    right = {name: p.grad for name, p in oracle.named_parameters() if p.grad is not None}

    targets = torch.cat([IDS[1:], torch.tensor([-1])])
    trained = {name: p for name, p in model.decoder.named_parameters() if p.requires_grad}
    batch = Batch(IDS, targets, Packed.of([len(IDS)]))
    step = step_gradient(model.decoder, Compute(model.ops, torch.float32), trained, [batch], 0.0)
    assert step is not None
    assert step.objective == pytest.approx(theirs.loss.item(), rel=1e-5)
    assert balanced == (step.objective > step.loss + 1e-4)
    names = hf_names(list(trained), FAMILIES[model.config.family])
    assert len(trained) > 30
    for (ours, _), mine in zip(trained.items(), step.gradient, strict=True):
        expected = their_gradient(right, ours, names[ours])
        # float32 rounding through the whole model, both ways: a few hundred operations of 2^-24.
        error = (mine.double() - expected).abs().max()
        assert error <= 3e-4 * float(expected.abs().max()) + 1e-7, ours


def test_the_balance_loss_is_shared_out_over_micro_batches(tmp_path: Path) -> None:
    _, model = opened("mixtral", tmp_path)
    trained = dict(model.decoder.named_parameters())
    batches = [Batch(IDS[a:b], IDS[a:b].roll(-1), Packed.of([b - a])) for a, b in ((0, 10), (10, 40))]
    compute = Compute(model.ops, torch.float32)
    extra = []
    for part in (batches, batches[:1], batches[1:]):
        step = step_gradient(model.decoder, compute, trained, part, 0.0)
        assert step is not None
        extra.append(step.objective - step.loss)
    assert extra[0] == pytest.approx((extra[1] + extra[2]) / 2, rel=1e-3)


def test_the_forms_of_latent_attention_agree_but_are_not_the_same(tmp_path: Path) -> None:
    _, expanded = opened("deepseek_v3", tmp_path / "a")
    _, absorbed = opened("deepseek_v3", tmp_path / "b", "absorbed")
    one, other = expanded.logits(IDS.tolist()), absorbed.logits(IDS.tolist())
    assert not same_bytes(one, other)
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)  # as against transformers: another order of sums
    absorbed.save(tmp_path / "c")
    assert load(tmp_path / "c", dtype="float32").config.mla_form == "absorbed"
    assert same_bytes(load(tmp_path / "c", dtype="float32").logits(IDS.tolist()), other)


def test_the_bias_of_the_choice_stays_in_float32(tmp_path: Path) -> None:
    """It decides between close scores, and no gradient trains it."""
    oracle, model = opened("deepseek_v3", tmp_path / "theirs", dtype="bfloat16")
    bias = model.decoder.get_parameter("layers.1.mlp.router.bias")
    assert same_bytes(bias.detach(), oracle.model.layers[1].mlp.gate.e_score_correction_bias)
    assert not bias.requires_grad
    model.save(tmp_path / "ours")
    again = load(tmp_path / "ours").decoder.get_parameter("layers.1.mlp.router.bias")
    assert same_bytes(again.detach(), bias.detach())


def test_layers_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 is published with a layer that predicts the second next token, beyond num_hidden_layers."""
    from safetensors.torch import load_file, save_file

    _, model = opened("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {f"model.layers.3.{name}": torch.zeros(4) for name in ("eh_proj.weight", "enorm.weight")}
    save_file({**tensors, **further}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert same_bytes(load(tmp_path, dtype="float32").logits([1, 2, 3]), model.logits([1, 2, 3]))


def test_counts() -> None:
    config = ModelConfig(
        vocab_size=10, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=1, num_experts=4,
        experts_per_token=2, expert_intermediate_size=8, shared_experts=1, dense_layers=1, family="deepseek_v3",
    )  # fmt: skip
    decoder = Decoder(config)
    attention, dense, expert, router = 4 * 16 * 16, 3 * 16 * 32, 3 * 16 * 8, 16 * 4
    active = 3 * attention + dense + 2 * (3 * expert + router) + 10 * 16
    assert matrix_weights(decoder) == active
    assert parameters(config) == sum(p.numel() for p in decoder.parameters())


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step.*2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts_per_token 9"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v3", {"n_group": 3}, "router_groups 3"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"mla_form": "folded"}, "mla_form"),
    ],
)
def test_what_cannot_work_is_named(name: str, change: dict[str, Any], named: str, tmp_path: Path) -> None:
    oracle = tiny(name)
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(LockstepError, match=named):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"v_head_dim": 24}, "v_head_dim is 24"), ({"mla_form": "absorbed", "kv_lora_rank": 40}, "kv_lora_rank is 40")],
)
def test_widths_that_the_kernels_do_not_take_are_named(change: dict[str, Any], named: str) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 10, "hidden_size": 16, "intermediate_size": 8, "num_layers": 1, "num_heads": 2,
        "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    }  # fmt: skip
    check_widths(ModelConfig(**sizes))
    with pytest.raises(LockstepError, match=named):
        check_widths(ModelConfig(**{**sizes, **change}))


def test_experts_carry_no_adapters() -> None:
    config = ModelConfig(
        vocab_size=10, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=1, num_experts=4, family="mixtral"
    )
    decoder = random_decoder(config, 0)
    with pytest.raises(LockstepError, match=r"down_proj, gate_proj, up_proj.*experts carry no adapters.*from k_"):
        add_lora(decoder, 2, 4.0)
    add_lora(decoder, 2, 4.0, ["q_proj", "o_proj"])
    assert sum(p.requires_grad for p in decoder.parameters()) == 4


@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
def test_weights_prepared_for_inference_give_the_bits_of_those_that_are_not(numerics: Any, tmp_path: Path) -> None:
    """Experts, router and the heads of the absorbed form have packs of their own."""
    _, model = opened("deepseek_v3", tmp_path, "absorbed", numerics=numerics)
    ops = operators(numerics)
    with torch.no_grad():
        plain = model.decoder(ops, IDS, Packed.of([len(IDS)]), dtype=torch.float32)
        model.decoder.prepare(ops, torch.float32)
        packed = model.decoder(ops, IDS, Packed.of([len(IDS)]), dtype=torch.float32)
    assert same_bytes(plain, packed)
