"""Models that several processes serve without sums across them: any canonical_tp, experts, latents, few key heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.config import ModelConfig
from lockstep.model import Decoder, Model, PackedCache, load
from lockstep.model.pages import make_pages
from lockstep.ops import Numerics, Packed, Paged, operators
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.serve import Engine, SamplingParams
from lockstep.serve.tp import open_model
from lockstep.serve.tp.fit import ServedPart, partition
from lockstep.serve.tp.gathered import Gathered
from lockstep.serve.weights import give_weights
from tests.ranks_as_threads import on_threads
from tests.serve.test_engine import EXPERTS, LATENTS, MIXTURES, bits, changed_weights, mixed_requests
from tests.serve.tiny import tiny_model

KINDS: dict[str, tuple[int, dict[str, object]]] = {
    "plain, biased": (2, {"family": "qwen2", "qkv_bias": True}),
    "one key head for four ranks": (4, {"num_kv_heads": 1, "family": "qwen3", "qk_norm": True, "head_dim": 16}),
    "two segments on four ranks": (4, {"num_kv_heads": 2, "canonical_tp": 2}),
    "experts": (2, {**EXPERTS, "dense_layers": 1}),
    "few rows, many experts": (2, {**EXPERTS, "num_experts": 32, "experts_per_token": 1}),
    "latents and experts": (2, {**EXPERTS, **LATENTS, "router_scoring": "sigmoid"}),
    "absorbed latents": (4, {**LATENTS, "mla_form": "absorbed"}),
}


@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_give_the_bytes_of_one(kind: str, numerics: Numerics) -> None:
    """Whole sequences, then a prompt and a decoding step over pages. Under `fast` the ranks do not promise bits."""
    ranks, changes = KINDS[kind]
    model = tiny_model(**changes)
    ops, state = operators(numerics), dict(model.decoder.named_parameters())

    def work(mesh: Mesh) -> list[Tensor]:
        part = partition(model.config, mesh, "bitwise")
        assert isinstance(part, Gathered)
        decoder = Decoder(part.local)
        give_weights(decoder, {name: part.take(name, tensor.detach()) for name, tensor in state.items()})
        assert sum(p.numel() for p in decoder.parameters()) < sum(p.numel() for p in state.values())
        return passes(Model(decoder.eval(), None, part.operators(ops), model.dtype))

    right = passes(Model(model.decoder, None, ops, model.dtype))
    for found, expected in zip(on_threads(MeshShape(tp=ranks), work)[0], right, strict=True):
        if numerics == "bitwise":
            assert torch.equal(found, expected)
        else:  # other shapes of products in bfloat16: the last of 8 bits may differ in every layer
            torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


def passes(model: Model) -> list[Tensor]:
    """Final hidden states, and logits: of two whole sequences, of a prompt over pages, of the token after it."""
    torch.set_num_threads(1)
    tokens = torch.tensor([(7 * i) % 300 + 3 for i in range(90)])
    cache = make_pages(
        model.config, model.ops.numerics, 3, model.dtype, lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    table, found = torch.tensor([[2, 0]], dtype=torch.int32), []
    with torch.inference_mode():
        for prepared in (False, True):
            if prepared:
                model.decoder.prepare(model.ops, model.dtype)
            hidden = model.decoder(model.ops, tokens, Packed.of([20, 70]), dtype=model.dtype)
            found += [hidden, model.decoder.head(model.ops, hidden[-3:])]
        for first, last in ((0, 80), (80, 81), (81, 82)):
            positions = torch.arange(first, last, dtype=torch.int32)
            batch = Paged(positions, torch.tensor([0, last - first], dtype=torch.int32), table)
            found.append(model.decoder(model.ops, tokens[first:last], batch, cache, model.dtype))
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gathered") / "model"
    tiny_model(family="deepseek_v3", **MIXTURES["experts and latents"]).save(path)
    return path


def test_slices_that_were_kept_packed_are_taken(directory: Path) -> None:
    """Also of experts that other ranks hold: nothing."""
    cache = PackedCache(pytest.fail, directory=directory.parent / "packed", small=0)

    def work(mesh: Mesh) -> tuple[list[Tensor], list[Tensor]]:
        def cut(config: ModelConfig) -> ServedPart:
            return partition(config, mesh, "bitwise")

        first, second = (passes(load(directory, packed=cache, part=cut)) for _ in range(2))
        return first, second

    right = passes(load(directory))
    for found in on_threads(MeshShape(tp=2), work)[0]:
        assert all(torch.equal(one, expected) for one, expected in zip(found, right, strict=True))
    assert len(list(cache.directory.glob("*.packed"))) == 2


def test_two_processes_serve_experts_with_the_bytes_of_one(directory: Path) -> None:
    model = load(directory)
    pair = Engine(open_model(str(directory), 2), kv_memory=2**22, max_batch_tokens=100, debug=True)
    alone = Engine(model, kv_memory=2**22, max_batch_tokens=100, debug=True)
    prompts, params = zip(*mixed_requests(5, model.config.vocab_size), strict=True)
    assert [bits(c) for c in alone.generate(prompts, params)] == [bits(c) for c in pair.generate(prompts, params)]
    state, score = changed_weights(model), SamplingParams(max_tokens=3, seed=1, logprobs=0, ignore_eos=True)
    for engine in (alone, pair):
        engine.update_weights(state)
    assert bits(*alone.generate([[5] * 70], score)) == bits(*pair.generate([[5] * 70], score))
    pair.close()
