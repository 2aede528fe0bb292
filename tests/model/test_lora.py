"""LoRA: no change at first, PEFT reads and writes the same adapters, merging is what it says."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import LockstepError
from lockstep.model import load
from lockstep.model.lora import TARGETS, adaptable, add_lora, has_lora, load_adapter, merge_lora, save_adapter
from tests.model.tiny import same_bytes, tiny

IDS = list(range(50))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    tiny("qwen2").save_pretrained(directory)
    return directory


@pytest.fixture
def model(base):
    return load(base, dtype="float32")


def perturb(model):
    """As after training: B is no longer zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for linear in adaptable(model.decoder).values():
            if linear.lora is not None:
                linear.lora.b.normal_(0, 0.1, generator=generator)


def test_a_new_adapter_changes_nothing_and_alone_trains(model):
    before = model.logits(IDS)
    add_lora(model.decoder, rank=4, alpha=8.0, targets=["q_proj", "down_proj"])
    assert torch.equal(model.logits(IDS), before)
    trained = {name for name, p in model.decoder.named_parameters() if p.requires_grad}
    assert trained == {f"layers.{i}.{m}.lora.{side}" for i in range(3) for m in ("attn.q", "mlp.down") for side in "ab"}
    perturb(model)
    assert not torch.equal(model.logits(IDS), before)


def test_gradients_reach_the_adapter(model):
    from lockstep.ops import Packed

    add_lora(model.decoder, rank=2, alpha=4.0)
    perturb(model)
    hidden = model.decoder(model.ops, torch.tensor(IDS), Packed.of([len(IDS)]), dtype=torch.float32)
    loss, _ = model.ops.linear_cross_entropy(
        hidden, model.decoder.head_weight, torch.tensor(IDS).roll(-1), torch.full((len(IDS),), 1 / len(IDS))
    )
    loss.backward()
    gradients = {name: p.grad for name, p in model.decoder.named_parameters() if p.requires_grad}
    assert len(gradients) == 2 * 7 * 3
    assert all(g is not None and g.abs().max() > 0 for g in gradients.values())
    assert model.decoder.embed.weight.grad is None


def test_peft_reads_ours(model, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    add_lora(model.decoder, rank=4, alpha=8.0)
    perturb(model)
    save_adapter(model.decoder, tmp_path / "adapter", base=str(base))
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    # As for the families: float32 sums in another order.
    torch.testing.assert_close(model.logits(IDS), expected, atol=1e-4, rtol=1e-4)
    again = load(tmp_path / "adapter", dtype="float32")
    assert same_bytes(again.logits(IDS), model.logits(IDS))


def test_we_read_pefts(base, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = LoraConfig(r=3, lora_alpha=7, target_modules=["v_proj", "gate_proj"], init_lora_weights=False)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    theirs.save_pretrained(tmp_path)
    ours = load(base, dtype="float32")
    load_adapter(ours.decoder, tmp_path)
    assert has_lora(ours.decoder)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(ours.logits(IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging(base, tmp_path, dtype):
    model = load(base, dtype=dtype)
    add_lora(model.decoder, rank=4, alpha=8.0)
    perturb(model)
    apart = model.logits(IDS)
    model.save(tmp_path / "merged")
    merged = load(tmp_path / "merged", dtype=dtype)
    # Merging rounds W + s B A once where the adapter's path rounds three times: 2 ** -8 each in bfloat16, over
    # 3 layers; logits are about 5. In float32 the bound is that of the families.
    tolerance = 1e-4 if dtype == "float32" else 0.15
    torch.testing.assert_close(merged.logits(IDS), apart, atol=tolerance, rtol=tolerance)
    merge_lora(model.decoder)
    assert not has_lora(model.decoder)
    assert same_bytes(model.logits(IDS), merged.logits(IDS))


def test_same_seed_same_adapter(base):
    first, second = load(base), load(base)
    for model in (first, second):
        add_lora(model.decoder, 4, 8.0, seed=3)
    pairs = zip(first.decoder.parameters(), second.decoder.parameters(), strict=True)
    assert all(same_bytes(a.detach(), b.detach()) for a, b in pairs)


def test_mistakes_are_named(model, base, tmp_path):
    with pytest.raises(LockstepError, match=r"unknown lm_head; choose from q_proj"):
        add_lora(model.decoder, 4, 8.0, ["lm_head"])
    with pytest.raises(LockstepError, match=r"lora.rank"):
        add_lora(model.decoder, 0, 8.0)
    with pytest.raises(LockstepError, match=r"no adapter to save"):
        save_adapter(model.decoder, tmp_path / "a", str(base))
    add_lora(model.decoder, 4, 8.0, TARGETS[:1])
    save_adapter(model.decoder, tmp_path / "a", str(base))
    fresh = load(base).decoder
    file, settings = tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_config.json"
    written = json.loads(settings.read_text())
    for key, value in {"use_dora": True, "peft_type": "IA3", "bias": "all"}.items():
        settings.write_text(json.dumps({**written, key: value}))
        with pytest.raises(LockstepError, match=r"only LoRA|use_dora"):
            load_adapter(fresh, tmp_path / "a")
    for key in ("r", "lora_alpha", "base_model_name_or_path"):
        settings.write_text(json.dumps({**written, key: None}))
        with pytest.raises(LockstepError, match=rf"adapter_config.json has {key} = None, which cannot be"):
            load_adapter(fresh, tmp_path / "a")
    settings.write_text(json.dumps({**written, "r": 5}))
    with pytest.raises(LockstepError, match=r"q_proj: lora_A and lora_B have shapes .*expected"):
        load_adapter(fresh, tmp_path / "a")
    settings.write_text(json.dumps(written))
    save_file({k.replace("q_proj", "qq_proj"): v for k, v in load_file(file).items()}, file)
    with pytest.raises(LockstepError, match=r"qq_proj, which the base model does not have"):
        load_adapter(fresh, tmp_path / "a")
    file.write_bytes(b"short")
    with pytest.raises(LockstepError, match=r"missing or damaged"):
        load_adapter(fresh, tmp_path / "a")
