"""One model on several real processes: the bytes of one, whatever is asked; what cannot be cut is refused."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.compile import ServingProgram
from lockstep.config import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model import Model, PackedCache, load
from lockstep.model.lora import add_lora, save_adapter
from lockstep.model.weights.packed import entries
from lockstep.ops import Packed
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.serve import Engine, SamplingParams, embed
from lockstep.serve.bits.proof import engine_degrees, prove_engine
from lockstep.serve.state import RanksLost
from lockstep.serve.tp import open_model
from lockstep.serve.tp.divide import fitted
from lockstep.serve.tp.fit import partition
from tests.ranks_as_threads import on_threads
from tests.serve.running import wait_for
from tests.serve.test_engine import EXPERTS, bits, changed_weights, mixed_requests, same_bits
from tests.serve.tiny import page_bytes, tiny_model

CUT = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "qk_norm": True, "canonical_tp": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tp") / "model"
    tiny_model(family="qwen3", tie_embeddings=True, **CUT).save(path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    torch.set_num_threads(1)
    return load(directory)


def engine(model: Model, served: object, **options: object) -> Engine:
    """Few pages, so that requests are preempted, and small steps, so that prompts come in chunks."""
    given = {"kv_memory": 7 * page_bytes(model), "max_batch_tokens": 100, "drafts": 3, "debug": True, **options}
    return Engine(served, **given)


@pytest.fixture(scope="module")
def alone(model: Model) -> Engine:
    return engine(model, model)


@pytest.fixture(scope="module")
def pair(model: Model, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two processes, each of which has its own slices from the cache of packed weights, and runs its passes as one
    program."""
    packed = PackedCache(print, directory=tmp_path_factory.mktemp("kept"), small=0)
    slices_logits(directory, packed)
    made = {path: path.stat() for path in packed.directory.iterdir()}
    served = engine(model, open_model(str(directory), 2, packed=packed))
    for path, before in made.items():
        now = path.stat()
        assert now.st_ino == before.st_ino, "it was packed again"
        assert now.st_mtime_ns > before.st_mtime_ns, "it was not used"
    assert isinstance(served._runner._forward, ServingProgram)
    yield served
    served.close()


def slices_logits(directory: Path, packed: PackedCache | None) -> torch.Tensor:
    """Of a short prompt, by two ranks as threads that hold their slices."""

    def work(mesh: Mesh) -> torch.Tensor:
        held = load(directory, packed=packed, part=lambda config: partition(config, mesh, "bitwise"))
        with torch.inference_mode():
            hidden = held.decoder(held.ops, torch.arange(3, 12), Packed.of([9]), dtype=held.dtype)
            return held.decoder.head(held.ops, hidden)

    return on_threads(MeshShape(tp=2), work)[0]


def test_slices_are_packed_once_and_have_the_bytes_of_the_whole(model, directory, tmp_path, monkeypatch):
    notes: list[str] = []
    packed = PackedCache(notes.append, directory=tmp_path / "kept", small=0)
    right = model.logits(list(range(3, 12)))
    for found in (slices_logits(directory, None), slices_logits(directory, packed)):
        assert torch.equal(found.view(torch.int32), right.view(torch.int32))
    kept = [name for _, name, _ in entries(packed.directory)]
    assert sorted(kept) == [f"{directory} rank {rank} of 2" for rank in range(2)]

    def no_packing(*_: object, **__: object) -> None:
        raise AssertionError("a weight was packed")

    monkeypatch.setattr(torch.ops.lockstep.pack_columns, "out", no_packing)
    again = slices_logits(directory, packed)
    assert torch.equal(again.view(torch.int32), right.view(torch.int32))
    assert notes == []


def test_a_mix_gives_the_bytes_of_one_process_and_of_the_training_forward(model, alone, pair):
    repeated = [5, 6, 7, 8] * 20, SamplingParams(temperature=0.0, max_tokens=70, logprobs=0, ignore_eos=True)
    prompts, params = zip(*mixed_requests(6, model.config.vocab_size), repeated, strict=True)
    one, two = alone.generate(prompts, params), pair.generate(prompts, params)
    assert [bits(c) for c in one] == [bits(c) for c in two]
    for prompt, asked, told in zip(prompts, params, two, strict=True):
        teacher = model.logprobs(prompt + told.token_ids)
        assert same_bits(told.logprobs, teacher[len(prompt) - 1 :])
        if asked.prompt_logprobs is not None:
            assert same_bits(told.prompt_logprobs, teacher[: len(prompt) - 1])
    assert alone.stats() == pair.stats(), "the scheduler does not know how many processes there are"
    assert pair.stats().preemptions > 0
    assert pair.stats().right_guesses > 0
    assert any(c.cached_tokens for c in pair.generate(prompts, params))


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 8))
def test_random_requests_with_aborts_give_the_bytes_of_one_process(model, alone, pair, seed, count, abort_at):
    told = []
    for served in (alone, pair):
        draw, outputs, known = random.Random(seed), [], {}
        for i in range(count):
            prompt = [draw.randrange(3, model.config.vocab_size) for _ in range(draw.choice([1, 40, 64, 130]))]
            params = SamplingParams(
                temperature=draw.choice([0.0, 1.0]), seed=i, max_tokens=draw.choice([0, 1, 30]), logprobs=2,
                n=draw.choice([1, 2]), prompt_logprobs=draw.choice([None, 1]), ignore_eos=True,
            )  # fmt: skip
            known[served.add_request(prompt, params, priority=draw.randrange(3))] = i
        for at in range(10_000):
            if at == abort_at:
                outputs += served.abort(next(iter(known)))
            if not served.has_work():
                break
            outputs += served.step()
        told.append([replace(one, request=known[one.request]) for one in outputs])
    assert told[0] == told[1]


def test_embeddings_have_the_bytes_of_one_process(model, pair):
    prompts = [[5, 6, 7], [9] * 100]
    for pooling in ("mean", "last"):
        here, there = embed(model, prompts, pooling), pair.embed(prompts, pooling)
        assert [v.tobytes() for v in here] == [v.tobytes() for v in there]
    with pytest.raises(LockstepError, match="not in the vocabulary"):
        pair.embed([[10**6]])


def test_a_model_in_memory_takes_new_weights_between_steps_and_outlives_no_rank(tmp_path):
    """With biases on what is cut, and a head of its own that the ranks share. A draft model guesses in the first."""
    tiny_model(family="qwen2", **{**CUT, "qk_norm": False, "qkv_bias": True}).save(tmp_path / "m")
    served, fresh, draft = load(tmp_path / "m"), load(tmp_path / "m"), tiny_model()
    two = engine(served, served, tp=2, draft_model=draft, kv_memory=2**22, level="O0")
    one = engine(fresh, fresh, draft_model=draft, kv_memory=2**22)
    state, prompt = changed_weights(served), list(range(3, 80))
    params = SamplingParams(max_tokens=30, seed=1, logprobs=0, ignore_eos=True)
    ends = []
    for each in (two, one):
        ended, request = [], each.add_request(prompt, params)
        for _ in range(4):
            ended += each.step()
        with pytest.raises(LockstepError, match="new weights do not fit"):
            each.update_weights({**state, "norm.weight": torch.zeros(3)})
        each.update_weights(state)
        while each.has_work():
            ended += each.step()
        ends.append([replace(output, request=request) for output in ended])
    assert ends[0] == ends[1]
    (after,) = two.generate([prompt], params)
    assert same_bits(after.logprobs, served.logprobs(prompt + after.token_ids)[len(prompt) - 1 :])
    _kill_a_rank_of(two)


def _kill_a_rank_of(served: Engine) -> None:
    """The watcher is told, and what is computed or asked for fails at once."""
    told: list[str] = []
    served.watch(told.append)
    assert not served._group.processes.meeting.parent.exists(), "nobody could remove it later"
    (other,) = [rank.process for rank in served._group.processes._ranks]
    served.add_request([5] * 20, SamplingParams(max_tokens=20))
    served.step()
    os.kill(other.pid, signal.SIGKILL)
    wait_for(lambda: told)
    assert told == ["rank 1 of 2 was killed by SIGKILL"]
    for _ in range(2):
        with pytest.raises(RanksLost, match="rank 1 of 2 was killed by SIGKILL"):
            served.step()


def test_int8_pages_and_a_model_without_canonical_tp_under_fast(tmp_path):
    """No bits are promised: sums are made in another order, in bfloat16, so log-probabilities move in the second
    decimal (8 bits of mantissa through 2 layers)."""
    tiny_model(num_heads=8, num_kv_heads=4, head_dim=16).save(tmp_path / "model")
    fast, score = load(tmp_path / "model", numerics="fast"), SamplingParams(max_tokens=0, prompt_logprobs=0)
    prompt = [(7 * i) % 300 + 3 for i in range(90)]
    two = Engine(fast, tp=2, kv_dtype="int8", kv_memory=2**22)
    one = Engine(fast, kv_dtype="int8", kv_memory=2**22)
    (told,), (right,) = (each.generate([prompt], score) for each in (two, one))
    two.close()
    torch.testing.assert_close(
        torch.tensor(told.prompt_logprobs), torch.tensor(right.prompt_logprobs), rtol=0.02, atol=0.1
    )


def prove_engines(model: Model, degrees: list[int]) -> None:
    """The engine's proofs of `eval bits`: what else it compares is no matter of processes."""
    for tp in degrees:
        proof = prove_engine(model, [[5] * 70, [7, 8, 9]], tp)
        assert (proof.compared, proof.differ) == (16, 0)
        assert proof.path.startswith("engine," if tp == 1 else f"engine of {tp} processes")


def test_eval_bits_proves_it(model):
    assert engine_degrees(model.config) == [1, 2, 4]
    assert engine_degrees(tiny_model().config) == [1]
    prove_engines(model, [1, 2])


@pytest.mark.slow
def test_eval_bits_proves_it_on_four_processes(model):
    """pytest -m slow tests/serve/test_tensor_parallel.py"""
    prove_engines(model, [4])


def test_what_cannot_be_cut_is_refused_with_what_to_change(model, tmp_path):
    def config(**changes: object) -> ModelConfig:
        return tiny_model(**changes).config

    with pytest.raises(LockstepError, match="tp is 3: it must divide the model's 4 attention heads"):
        fitted(config(num_heads=4), 3, "bitwise")
    with pytest.raises(LockstepError, match=r"divide the model's 2 key heads \(or be a multiple of them\)"):
        fitted(config(num_heads=6, num_kv_heads=2, head_dim=16), 3, "bitwise")
    with pytest.raises(LockstepError, match="divide the model's 6 experts"):
        fitted(config(**EXPERTS), 4, "bitwise")
    assert fitted(config(**CUT), 2, "bitwise").canonical_tp == 4
    with pytest.raises(LockstepError, match="tp is 16: it must divide the model's 8 attention heads"):
        Engine(model, tp=16)
    with pytest.raises(LockstepError, match="tp is 0"):
        Engine(model, tp=0)
    adapted = tiny_model(**CUT)
    add_lora(adapted.decoder, 4, 8.0)
    with pytest.raises(LockstepError, match="adapters are not cut"):
        Engine(adapted, tp=2)
    save_adapter(adapted.decoder, tmp_path / "adapter", "base")
    with pytest.raises(LockstepError, match=r"is an adapter, .* merge it \(lockstep export"):
        load(tmp_path / "adapter", part=lambda config: None)
