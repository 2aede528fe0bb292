"""Fine-tuning: adapters alone, whole models from a directory, and what comes out at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.model.hash import hash_path, hash_tensors
from lockstep.model.lora import merge_lora
from lockstep.train import Trainer, speed
from lockstep.train.checkpoint import checkpoints

Tiny = Callable[..., Config]


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)


@pytest.fixture
def base(tiny: Tiny, tmp_path: Path) -> Path:
    """A model directory to fine-tune."""
    result = Trainer(tiny(tmp_path / "base", train={"steps": 2, "export": True, "dtype": "bfloat16"})).fit()
    assert result.export is not None
    return result.export


def tuning(tiny: Tiny, base: Path, out: Path, **lora: object) -> Config:
    config = tiny(out, train={"steps": 3, "export": True, "dtype": "bfloat16"}, lora={"rank": 4, **lora})
    return config.model_copy(update={"model": str(base)})


def test_only_adapters_train(tiny: Tiny, base: Path, tmp_path: Path) -> None:
    trainer = Trainer(tuning(tiny, base, tmp_path / "run"))
    frozen = {n: p for n, p in trainer.model.decoder.named_parameters() if ".lora." not in n}
    before = hash_tensors(sorted((n, p.clone()) for n, p in frozen.items()))
    trainer.fit()
    assert hash_tensors(sorted(frozen.items())) == before
    trained = trainer.state_dict()["model"]
    assert len(trained) == 2 * 2 * 7
    assert all(".lora." in name for name in trained)
    assert all(bool(t.any()) for name, t in trained.items() if name.endswith(".b"))


def test_merged_and_separate_exports(tiny: Tiny, base: Path, tmp_path: Path) -> None:
    text = [3, 100, 101, 102, 103]
    merged = Trainer(tuning(tiny, base, tmp_path / "a", targets=["q_proj", "up_proj"])).fit().export
    apart_run = Trainer(tuning(tiny, base, tmp_path / "b", targets=["q_proj", "up_proj"], merge=False))
    apart = apart_run.fit().export
    assert merged is not None
    assert apart is not None
    assert sorted(p.name for p in apart.glob("adapter*")) == ["adapter_config.json", "adapter_model.safetensors"]
    # The adapter directory computes what the trainer's model does, in the same bits.
    loaded = lockstep.load(apart)
    assert torch.equal(loaded.logprobs(text), apart_run.model.logprobs(text))
    # Merging rounds the weights to bfloat16 once more: close, not equal. 2**-8 relative, a few roundings deep.
    torch.testing.assert_close(lockstep.load(merged).logits(text), loaded.logits(text), atol=0.02, rtol=0.02)


def test_a_runs_directory_is_its_newest_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    trainer = Trainer(tiny(tmp_path / "run", train={"save_every": 2, "dtype": "bfloat16"}))
    trainer.fit()
    assert hash_path(tmp_path / "run") == hash_path(checkpoints(tmp_path / "run")[-1])
    text = [3, 100, 101, 102, 103]
    assert torch.equal(lockstep.load(tmp_path / "run").logprobs(text), trainer.model.logprobs(text))


def test_a_checkpoint_of_adapters_says_how_to_export(tiny: Tiny, base: Path, tmp_path: Path) -> None:
    Trainer(tuning(tiny, base, tmp_path / "run")).fit()
    with pytest.raises(LockstepError, match=rf"--out {tmp_path}/run --resume --set train.export=true"):
        lockstep.load(tmp_path / "run")


@pytest.mark.parametrize("rank", [0, 2])
def test_training_goes_on_from_an_adapter(tiny: Tiny, base: Path, tmp_path: Path, rank: int) -> None:
    first = Trainer(tuning(tiny, base, tmp_path / "first", merge=False)).fit().export
    assert first is not None
    assert hash_path(first) not in (hash_path(base), hash_path(tmp_path / "base" / "checkpoints" / "step-00000002"))
    config = tuning(tiny, first, tmp_path / "run", rank=rank)
    trainer = Trainer(config)
    merged = lockstep.load(first, dtype="bfloat16" if rank else "float32")
    merge_lora(merged.decoder)
    began, expected = (dict(m.decoder.named_parameters()) for m in (trainer.model, merged))
    assert all(torch.equal(began[name], expected[name]) for name in expected)
    trainer.fit()
    if rank:
        with pytest.raises(LockstepError, match="which is an adapter itself: merge that one first"):
            Trainer(config, train={"out": str(tmp_path / "apart")}, lora={"merge": False})


def test_an_adapter_on_an_adapter_is_refused(tiny: Tiny, base: Path, tmp_path: Path) -> None:
    first = Trainer(tuning(tiny, base, tmp_path / "run", merge=False)).fit().export
    assert first is not None
    settings = shutil.copytree(first, tmp_path / "second") / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": str(first)}))
    for read in (lockstep.load, hash_path):
        with pytest.raises(LockstepError, match="is an adapter on the adapter"):
            read(tmp_path / "second")


def test_adapters_resume_bit_for_bit(tiny: Tiny, base: Path, tmp_path: Path) -> None:
    whole = Trainer(tuning(tiny, base, tmp_path / "whole"))
    whole.fit()
    config = tuning(tiny, base, tmp_path / "run")
    Trainer(config, train={"save_every": 1, "keep_last": 9}).fit()
    again = Trainer(config, resume=tmp_path / "run" / "checkpoints" / "step-00000001")
    again.fit()
    found, expected = (t.state_dict()["model"] for t in (again, whole))
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_another_base_is_refused(tiny: Tiny, base: Path, tmp_path: Path) -> None:
    config = tuning(tiny, base, tmp_path / "run")
    Trainer(config).fit()
    other = Trainer(tiny(tmp_path / "base2", train={"steps": 3, "export": True})).fit().export
    with pytest.raises(LockstepError, match=r"base weights \(hash\)"):
        Trainer(config.model_copy(update={"model": str(other)}), resume=tmp_path / "run")


def test_a_model_object_is_fine_tuned(tiny: Tiny, base: Path, text: Path, tmp_path: Path) -> None:
    model = lockstep.load(base)
    start = model.logprobs([1, 2, 3])
    options = {"out": str(tmp_path / "run"), "steps": 2, "tensorboard": False, "micro_batch": 1, "eval_every": 0}
    trainer = Trainer(model, {"sources": [str(text)], "seq_len": 32}, train=options, schedule={"warmup_steps": 1})
    trainer.fit()
    assert not torch.equal(trainer.model.logprobs([1, 2, 3]), start)
    # The files of the base are as they were: masters are copies, not views of the mapped file.
    assert torch.equal(lockstep.load(base).logprobs([1, 2, 3]), start)


def test_separate_adapters_need_a_base_with_a_name(tiny: Tiny) -> None:
    with pytest.raises(LockstepError, match=r"lora.merge: false"):
        Trainer(tiny(lora={"rank": 2, "merge": False}))


def test_a_checkpoint_is_a_model_directory(tiny: Tiny, tmp_path: Path) -> None:
    trainer = Trainer(tiny(train={"export": True}))
    result = trainer.fit()
    path = checkpoints(trainer.out)[-1]
    assert result.export is not None
    # float32 compute: the export holds the masters themselves.
    assert hash_path(path) == hash_path(result.export)
    loaded = lockstep.load(path, dtype="float32")
    assert torch.equal(loaded.logprobs([5, 6, 7]), trainer.model.logprobs([5, 6, 7]))
    assert loaded.tokenizer.encode("def f():") == trainer.model.tokenizer.encode("def f():")


def test_a_whole_model_resumes_without_its_base(tiny: Tiny, base: Path, tmp_path: Path) -> None:
    config = tuning(tiny, base, tmp_path / "run", rank=0)
    whole = Trainer(config, train={"save_every": 1, "keep_last": 9})
    whole.fit()
    shutil.rmtree(base)
    again = Trainer(config, resume=tmp_path / "run" / "checkpoints" / "step-00000001")
    again.fit()
    found, expected = (t.state_dict()["model"] for t in (again, whole))
    assert all(torch.equal(found[n], expected[n]) for n in expected)
