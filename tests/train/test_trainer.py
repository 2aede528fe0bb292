"""The trainer in one process: learning, bad steps, accumulation, threads, evaluation, resume, refusals."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.config import Config, load_config
from lockstep.errors import LockstepError
from lockstep.train import Trainer, resume, speed
from lockstep.train.checkpoint import checkpoints
from lockstep.train.checkpoint.manifest import describe
from lockstep.train.engine import OneProcess
from lockstep.train.memory import parameters
from lockstep.train.metrics import read_metrics
from lockstep.train.resolve import resolve
from lockstep.train.step import StepGradient, step_gradient

Tiny = Callable[..., Config]


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state_dict()["model"].items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def fitted(config: Config, **keys: Any) -> Trainer:
    trainer = Trainer(config, **keys)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_falls_on_real_text(tiny: Tiny, dtype: str) -> None:
    config = tiny(train={"steps": 30, "dtype": dtype, "eval_every": 30}, optimizer={"lr": 1e-2})
    trainer = fitted(config)
    lines = read_metrics(trainer.out)
    losses = [m["loss"] for m in lines if "loss" in m]
    assert losses[0] == pytest.approx(math.log(300), abs=0.3)  # near uniform at the start
    assert losses[-1] < losses[0] - 1.2
    (found,) = [m for m in lines if "eval_loss" in m]
    assert found["step"] == 30
    assert found["eval_loss"] < losses[0] - 1.2
    nats_per_byte = found["eval_loss"] / trainer.run.data.bytes_per_token
    assert found["bits_per_byte"] == pytest.approx(nats_per_byte / math.log(2))


def test_two_threads_give_the_bits_of_one(tiny: Tiny, tmp_path: Path) -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(weights(fitted(tiny(tmp_path / str(threads), train={"steps": 2, "dtype": "bfloat16"}))))
    assert same(*found)


def test_the_gradient_is_the_tree_over_micro_batches(tiny: Tiny) -> None:
    """Each micro-batch alone, with the weights of the whole, then the defined tree by hand: the same bits."""
    trainer = Trainer(tiny(train={"micro_batches": 5}))
    run = trainer.run
    batches = run.data.global_batch(0, 2, 5)
    found = step_gradient(run.model.decoder, run.compute, run.parameters, batches, 0.0)
    assert found is not None
    total = sum(b.loss_tokens for b in batches)
    singles = []
    for batch in batches:
        hidden = run.model.decoder(run.model.ops, batch.tokens, batch.packed, dtype=run.model.dtype)
        each = torch.full(batch.targets.shape, 1.0 / total)
        loss, _ = run.model.ops.linear_cross_entropy(hidden, run.model.decoder.head_weight, batch.targets, each)
        singles.append(torch.autograd.grad(loss, list(run.parameters.values())))
    for i, gradient in enumerate(found.gradient):
        a, b, c, d, e = (s[i] for s in singles)
        assert torch.equal(gradient, ((a + b) + (c + d)) + e)
    trainer.close()


def test_accumulated_gradient_is_that_of_one_batch(tiny: Tiny) -> None:
    """In float32 only close: one batch sums over its rows in another order than the tree."""
    trainer = Trainer(tiny())
    run = trainer.run
    one = step_gradient(run.model.decoder, run.compute, run.parameters, run.data.global_batch(0, 8, 1), 0.0)
    many = step_gradient(run.model.decoder, run.compute, run.parameters, run.data.global_batch(0, 1, 8), 0.0)
    assert one is not None
    assert many is not None
    for a, b in zip(one.gradient, many.gradient, strict=True):
        # float32 sums of a few hundred terms: relative 1e-5 of the largest element.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max()))
    assert one.loss == pytest.approx(many.loss, rel=1e-6)
    trainer.close()


def test_z_loss_is_added_to_the_objective_not_to_the_loss(tiny: Tiny) -> None:
    trainer = Trainer(tiny())
    run = trainer.run
    batches = run.data.global_batch(0, 2, 2)
    plain = step_gradient(run.model.decoder, run.compute, run.parameters, batches, 0.0)
    with_z = step_gradient(run.model.decoder, run.compute, run.parameters, batches, 0.1)
    assert plain is not None
    assert with_z is not None
    assert plain.loss == with_z.loss
    # The logits are near 0 at the start, so log Z is near log V.
    assert with_z.objective - plain.objective == pytest.approx(0.1 * math.log(300) ** 2, rel=0.02)
    trainer.close()


def test_resume_in_one_process(tiny: Tiny, tmp_path: Path) -> None:
    whole = fitted(tiny(tmp_path / "whole"))
    out = tmp_path / "parts"
    fitted(tiny(out, train={"save_every": 2, "keep_last": 9}))
    again = Trainer(tiny(out), resume=out / "checkpoints" / "step-00000002")
    assert again.position.step == 2
    # What came later is kept, under another name.
    assert [p.name for p in checkpoints(out)] == ["step-00000002"]
    again.fit()
    assert same(weights(again), weights(whole))
    moments = [t.state_dict()["optimizer"] for t in (again, whole)]
    assert same(*moments)
    late = Trainer(tiny(tmp_path / "late"))
    late.resume(out)
    assert late.position.step == 6
    assert same(weights(late), weights(whole))
    late.close()


EXPERTS = {
    "num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 32, "shared_experts": 1, "dense_layers": 1,
    "family": "deepseek_v3", "router_scoring": "sigmoid", "num_kv_heads": 2, "head_dim": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
BALANCED = {"num_experts": 4, "experts_per_token": 2, "family": "mixtral", "router_aux_loss": 0.01}


@pytest.mark.parametrize("model", [EXPERTS, BALANCED], ids=["deepseek_v3", "mixtral"])
def test_a_model_with_experts_learns_resumes_and_is_exported(tiny: Tiny, tmp_path: Path, model: dict[str, Any]) -> None:
    steps = {"steps": 12, "export": True}
    whole = fitted(tiny(tmp_path / "whole", model=model, train=steps, optimizer={"lr": 1e-2}))
    losses = [m["loss"] for m in read_metrics(whole.out) if "loss" in m]
    assert losses[-1] < losses[0] - 0.3
    out = tmp_path / "parts"
    part = tiny(out, model=model, train={**steps, "save_every": 5, "keep_last": 9}, optimizer={"lr": 1e-2})
    fitted(part)
    again = Trainer(part, resume=out / "checkpoints" / "step-00000005")
    again.fit()
    assert same(weights(again), weights(whole))
    assert lockstep.load(whole.out / "export").config.num_experts == 4


def test_a_bias_that_no_gradient_trains_is_in_the_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """A resumed run has it from there: the model that the run began with may be gone."""
    name = "layers.1.mlp.router.bias"
    first = fitted(tiny(tmp_path / "first", model=EXPERTS, train={"steps": 2}))
    first.model.decoder.get_parameter(name).copy_(torch.tensor([0.3, -0.2, 0.1, 0.7]))
    first.model.save(tmp_path / "base")
    config = tiny(tmp_path / "run", train={"steps": 4, "save_every": 2, "keep_last": 9})
    whole = fitted(config.model_copy(update={"model": str(tmp_path / "base")}))
    shutil.rmtree(tmp_path / "base")
    again = Trainer(whole.config, resume=whole.out / "checkpoints" / "step-00000002")
    again.fit()
    assert again.model.decoder.get_parameter(name).tolist() == pytest.approx([0.3, -0.2, 0.1, 0.7])
    assert same(weights(again), weights(whole))


def test_the_generator_state_is_restored(tiny: Tiny, tmp_path: Path) -> None:
    torch.manual_seed(5)
    trainer = fitted(tiny())
    expected = torch.rand(3)
    torch.manual_seed(99)
    Trainer(trainer.config, resume=trainer.out).close()
    assert torch.equal(torch.rand(3), expected)


def spoil(monkeypatch: pytest.MonkeyPatch, bad: set[int], what: str) -> None:
    """Make the engine's gradient NaN or infinite, whatever computed it, at the calls in ``bad`` (0-based)."""
    calls, original = iter(range(10**6)), OneProcess.gradient

    def gradient(*arguments: Any) -> Any:
        found = original(*arguments)
        assert found is not None
        if next(calls) not in bad:
            return found
        if what == "loss":
            return replace(found, objective=float("nan"), loss=float("nan"))
        found.gradient[0].view(-1)[0] = float("inf")
        return found

    monkeypatch.setattr(OneProcess, "gradient", gradient)


@pytest.mark.parametrize(("what", "level"), [("loss", "O0"), ("gradient", "O0"), ("gradient", "O2")])
def test_a_bad_step_is_skipped_and_reported(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, what: str, level: str) -> None:
    spoil(monkeypatch, {1}, what)
    trainer = Trainer(tiny(train={"steps": 2, "save_every": 1}, compile={"level": level}))
    trainer.fit()
    assert (trainer.position.step, trainer.position.updates, trainer.position.bad) == (2, 1, 1)
    lines = read_metrics(trainer.out)
    assert [m.get("skipped") for m in lines] == [None, what]
    # The weights are those after step 1, and nothing is saved after the bad step.
    assert [p.name for p in checkpoints(trainer.out)] == ["step-00000001"]
    monkeypatch.undo()
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)
    saved = Trainer(trainer.config, resume=trainer.out)
    assert same(weights(saved), weights(trainer))
    saved.close()


def test_training_goes_on_after_a_bad_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, {1, 2}, "loss")
    trainer = fitted(tiny(train={"max_bad_steps": 3}))
    assert (trainer.position.step, trainer.position.updates, trainer.position.bad) == (6, 4, 0)
    assert checkpoints(trainer.out)[-1].name == "step-00000006"


def test_it_stops_after_too_many_and_leaves_the_good_checkpoint(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, {2, 3, 4}, "loss")
    trainer = Trainer(tiny(train={"steps": 9, "save_every": 1, "max_bad_steps": 3}))
    with pytest.raises(LockstepError, match=r"NaN or infinite in 3 steps in a row \(train.max_bad_steps\)") as error:
        trainer.fit()
    assert str(trainer.out / "checkpoints" / "step-00000002") in str(error.value)
    assert checkpoints(trainer.out)[-1].name == "step-00000002"


def test_real_divergence_is_caught(tiny: Tiny) -> None:
    """No injection: a learning rate that overflows float32."""
    trainer = Trainer(tiny(optimizer={"lr": 1e38}, train={"steps": 20, "max_bad_steps": 2, "save_every": 1}))
    with pytest.raises(LockstepError, match=r"in 2 steps in a row|holds NaN or infinite weights"):
        trainer.fit()
    for path in checkpoints(trainer.out):
        saved = Trainer(trainer.config, resume=path)
        assert all(torch.isfinite(t).all() for t in weights(saved).values())
        saved.close()


def test_a_failed_save_costs_a_message_not_the_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = resume.save_checkpoint, []

    def full_once(path: Path, *arguments: Any) -> None:
        if not failed:
            failed.append(path)
            raise LockstepError("cannot save: disk full")
        real(path, *arguments)

    monkeypatch.setattr(resume, "save_checkpoint", full_once)
    trainer = fitted(tiny(train={"save_every": 2}))
    assert [p.name[-1] for p in checkpoints(trainer.out)] == ["4", "6"]
    assert [m["step"] for m in read_metrics(trainer.out) if "save_failed" in m] == [2]


def test_the_configuration_is_saved_and_reloads_equal(tiny: Tiny) -> None:
    trainer = fitted(tiny())
    assert load_config(trainer.out / "config.yaml") == trainer.config
    assert load_config(checkpoints(trainer.out)[-1] / "config.yaml") == trainer.config


def test_metrics_are_json_lines_and_tensorboard(tiny: Tiny) -> None:
    trainer = fitted(tiny(train={"tensorboard": True, "log_every": 2}))
    lines = [json.loads(line) for line in (trainer.out / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines] == [2, 4, 6]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "memory"} <= lines[0].keys()
    assert lines[-1]["tokens"] == trainer.position.tokens
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trainer.out / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [2, 4, 6]


def test_clipping_limits_the_update(tiny: Tiny, tmp_path: Path) -> None:
    """With a tiny limit the optimizer sees gradients scaled to that norm: its first moment shows it."""
    trainer = Trainer(tiny(optimizer={"clip_norm": 1e-3, "beta1": 0.0}, train={"steps": 2}))
    trainer.fit()
    moments = [t for n, t in trainer.state_dict()["optimizer"].items() if n.startswith("first.")]
    assert math.sqrt(sum(float(m.double().square().sum()) for m in moments)) == pytest.approx(1e-3, rel=1e-5)
    assert read_metrics(trainer.out)[-1]["grad_norm"] > 1e-3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"seq_len": 256}}, r"data.seq_len 256 is longer than the model's max_positions 128"),
        ({"data": {"sources": ["/no/such"]}}, "'/no/such' does not exist"),
        ({"compile": {"disable_pass": ["dead-cod"]}, "data": {"sources": ["/no/such"]}}, "Did you mean 'dead-code'"),
        ({"data": {"tokenizer": "/no/such"}}, "data.tokenizer: /no/such is no directory"),
        ({"schedule": {"warmup_steps": 50}}, "the schedule needs 50 steps"),
        ({"model": {"head_dim": 24}}, "head_dim is 24; the attention kernel takes multiples of 16"),
        ({"model": {"hidden_size": 2**22}}, r"weights, gradients and moments take .* GiB, and this machine has"),
        ({"model": {"num_layers": 10**9}}, r"weights, gradients and moments take .* GiB, and this machine has"),
    ],
)
def test_wrong_input_is_named(tiny: Tiny, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(LockstepError, match=message):
        Trainer(tiny(**sections))


def test_data_may_be_given_by_place_and_by_name(tiny: Tiny, tmp_path: Path, text: Path) -> None:
    plain = tiny()
    for given in ((str(text),), ([str(text)],), ({"sources": [str(text)]},)):
        config, _ = resolve(plain, *given, {"data": {"seq_len": 16}})
        assert (config.data.sources, config.data.seq_len, config.data.held_out) == ([str(text)], 16, 0.1)
    assert resolve(plain, None, {"data": "other.txt"})[0].data.sources == ["other.txt"]
    with pytest.raises(LockstepError, match="data gives sources twice, by place and by name: leave one out"):
        Trainer(plain, str(text), data={"sources": ["other.txt"]})
    with pytest.raises(LockstepError, match="`train` is 7: expected a mapping"):
        Trainer(plain, train=7)
    with pytest.raises(LockstepError, match=r"model is 'smol', which has no keys to set; found .'vocab_size': 9"):
        Trainer(plain.model_copy(update={"model": "smol"}), model={"vocab_size": 9})


def test_a_vocabulary_larger_than_the_embedding_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    first = Trainer(tiny())
    first.model.tokenizer.save(tmp_path)
    first.close()
    config = tiny(tmp_path / "other", data={"tokenizer": str(tmp_path)})
    with pytest.raises(LockstepError, match=r"300 tokens but the embedding only 200 rows \(model.vocab_size\)"):
        Trainer(config, model={"vocab_size": 200})


def test_parameters_are_counted_without_making_them(tiny: Tiny) -> None:
    trainer = Trainer(tiny())
    assert parameters(trainer.model.config) == sum(p.numel() for p in trainer.model.decoder.parameters())
    trainer.close()


def test_shapes_that_do_not_fit_are_named(tiny: Tiny, tmp_path: Path) -> None:
    trainer = fitted(tiny())
    with pytest.raises(
        LockstepError, match=r"does not fit the model: .*gate_proj.weight is \[64, 32\], the model has \[48"
    ):
        Trainer(trainer.config, resume=trainer.out, allow_changes=True, model={"intermediate_size": 48})


def test_a_checkpoint_whose_sums_over_the_vocabulary_were_made_otherwise_is_refused(tiny: Tiny) -> None:
    """Older versions made them in one piece whatever canonical_tp was, and did not say so."""
    trainer = fitted(tiny(model={"num_kv_heads": 2}, train={"canonical_tp": 2, "steps": 2}))
    path = checkpoints(trainer.out)[-1]
    state = json.loads((path / "state.json").read_text())
    assert state.pop("vocabulary_segments") == 2
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = describe(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LockstepError, match="segments of the vocabulary: 1 -> 2"):
        Trainer(trainer.config, resume=trainer.out)


def test_another_corpus_is_refused_on_resume(tiny: Tiny, tmp_path: Path) -> None:
    trainer = fitted(tiny())
    other = Trainer(tiny(tmp_path / "other"), train={"steps": 7})
    with pytest.raises(LockstepError, match=r"train.steps: 6 -> 7"):
        other.resume(trainer.out)
    other.close()
    (tmp_path / "new.txt").write_text("something else\n" * 300)
    third = Trainer(tiny(tmp_path / "third"), str(tmp_path / "new.txt"))
    with pytest.raises(LockstepError, match="content hash"):
        third.resume(trainer.out)
    third.close()


def test_another_corpus_is_refused_although_the_first_one_is_cached(tiny: Tiny, tmp_path: Path) -> None:
    trainer = fitted(tiny())
    (tmp_path / "new.txt").write_text("something else\n" * 300)
    with pytest.raises(LockstepError, match="content hash"):
        Trainer(trainer.config, str(tmp_path / "new.txt"), resume=trainer.out)
    other = Trainer(trainer.config, str(tmp_path / "new.txt"), resume=trainer.out, allow_changes=True)
    assert other.run.data.tokens.about.bytes == len("something else\n" * 300)
    # The weights know the ids of their own tokenizer, whatever they are trained on next.
    assert other.model.tokenizer.backend.to_str() == trainer.model.tokenizer.backend.to_str()
    other.close()


def test_the_corpus_may_be_tokenised_again_on_resume(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    trainer = fitted(tiny())
    shutil.rmtree(trainer.out / "data")
    copy = shutil.copy(text, tmp_path / "moved.txt")
    Trainer(trainer.config, str(copy), resume=trainer.out).close()


def test_adapters_and_whole_models_do_not_resume_each_other(tiny: Tiny) -> None:
    trainer = fitted(tiny())
    with pytest.raises(LockstepError, match="holds a whole model, but this run trains adapters: give"):
        Trainer(trainer.config, lora={"rank": 2}, resume=trainer.out, allow_changes=True)


def test_a_tilde_is_the_home_directory(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fitted(tiny(), train={"out": "~/run"}).out == tmp_path / "run"
    again = Trainer(tiny(), train={"out": "~/run"}, resume="~/run")
    assert again.position.step == 6
    again.close()


def test_one_directory_one_trainer(tiny: Tiny) -> None:
    first = Trainer(tiny())
    with pytest.raises(LockstepError, match="is in use by another Trainer of this process"):
        Trainer(tiny())
    first.close()
    Trainer(tiny()).close()
    first = fitted(tiny())
    with pytest.raises(LockstepError, match="already holds a run"):
        Trainer(tiny()).fit()


def test_nothing_to_resume_is_told_and_makes_no_directory(tiny: Tiny, tmp_path: Path) -> None:
    for missing in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000007"):
        with pytest.raises(LockstepError, match=f"nothing to resume: {missing} is no directory"):
            Trainer(tiny(), resume=missing)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(LockstepError, match="holds no checkpoint to resume from"):
        Trainer(tiny(), resume=tmp_path / "run")


def test_a_stopped_trainer_can_fit_again(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same object goes on, holds the directory again, and ends where the whole run ends."""
    whole = fitted(tiny(tmp_path / "whole"))
    trainer = Trainer(tiny())
    real = OneProcess.norm

    def interrupted(engine: OneProcess, found: StepGradient) -> float:
        if engine.optimizer.step_count == 2:
            signal.raise_signal(signal.SIGINT)
        return real(engine, found)

    monkeypatch.setattr(OneProcess, "norm", interrupted)
    assert trainer.fit().stopped_by == "SIGINT"
    assert checkpoints(trainer.out)[-1].name == "step-00000003"
    monkeypatch.setattr(OneProcess, "norm", real)
    assert trainer.fit().stopped_by is None
    assert same(weights(trainer), weights(whole))
