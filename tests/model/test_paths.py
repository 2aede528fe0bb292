"""Contract C1 and C2 at the level of the model: batch, prefill, chunks and decode give the training forward's bits."""

import json
from itertools import chain

import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.model import load
from lockstep.model.pages import make_pages
from lockstep.ops import PAGE, Packed, Paged
from tests.model.tiny import same_bytes, tiny

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


FAMILIES = ["llama3", "mistral", "qwen2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v3 absorbed"]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    name, _, form = request.param.partition(" ")
    path = tmp_path_factory.mktemp(name)
    tiny(name).save_pretrained(path)
    if form:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "mla_form": form}))
    return path


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def packed(model, sequences):
    hidden = model.decoder(model.ops, torch.tensor(list(chain(*sequences))), Packed.of([len(s) for s in sequences]),
                           dtype=model.dtype)  # fmt: skip
    return model.decoder.head(model.ops, hidden).split([len(s) for s in sequences])


@torch.no_grad()
def paged(model, sequences, steps):
    """Run sequences through pages; steps: a list of how many tokens each sequence advances by."""
    pages = -(-128 // PAGE)
    make = lambda shape, dtype: torch.zeros(shape, dtype=dtype)  # noqa: E731
    caches = make_pages(model.config, model.ops.numerics, pages * len(sequences), model.dtype, make)
    # Pages of the sequences are interleaved and in falling order: nothing may rest on where a page lies.
    table = torch.arange(pages * len(sequences), dtype=torch.int32).flip(0).view(pages, len(sequences)).t().contiguous()
    done, rows = [0] * len(sequences), [[] for _ in sequences]
    for step in steps:
        counts = [min(step, len(s) - d) for s, d in zip(sequences, done, strict=True)]
        live = [i for i, count in enumerate(counts) if count]
        tokens = list(chain(*(sequences[i][done[i] : done[i] + counts[i]] for i in live)))
        positions = torch.cat([torch.arange(done[i], done[i] + counts[i], dtype=torch.int32) for i in live])
        starts = torch.tensor([0, *(counts[i] for i in live)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = Paged(positions, starts, table[live])
        hidden = model.decoder(model.ops, torch.tensor(tokens), batch, caches, model.dtype)
        logits = model.decoder.head(model.ops, hidden).split([counts[i] for i in live])
        for i, part in zip(live, logits, strict=True):
            rows[i].append(part)
            done[i] += counts[i]
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_path_gives_the_same_bits(directory, dtype):
    model = load(directory, dtype=dtype)
    sequences = [ids(n, n) for n in (1, 3, 70, 128, 64)]
    alone = [model.logits(s) for s in sequences]
    together = packed(model, sequences)
    prefill = paged(model, sequences, [128])
    chunks = paged(model, sequences, [5, 60, 1, 1, 61])
    for i in range(len(sequences)):
        assert same_bytes(alone[i], together[i]), "packed batch"
        assert same_bytes(alone[i], prefill[i]), "paged prefill"
        assert same_bytes(alone[i], chunks[i]), "chunked prefill and decode"


def test_decode_token_by_token(directory):
    model = load(directory)
    sequence = ids(70)
    assert same_bytes(model.logits(sequence), paged(model, [sequence], [1] * 70)[0])


def test_a_packed_weight_is_the_weight_and_is_dropped_when_it_changes(directory):
    model = load(directory)
    sequence = ids(9)
    with torch.no_grad():
        plain = packed(model, [sequence])[0]
    first = model.logits(sequence)  # prepares
    assert same_bytes(plain, first)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(1.5)
    changed = packed(model, [sequence])[0]
    assert not same_bytes(first, changed)
    assert same_bytes(changed, model.logits(sequence))


def test_master_weights_give_the_bits_of_their_export(directory, tmp_path):
    """float32 masters computed in bfloat16, against the bfloat16 export: rounding at use is rounding once."""
    masters = load(directory, dtype="float32")
    masters.dtype = torch.bfloat16
    masters.save(tmp_path / "export")
    sequence = ids(40)
    assert same_bytes(masters.logits(sequence), load(tmp_path / "export").logits(sequence))


def test_logprobs_are_log_softmax_of_logits(directory):
    model = load(directory)
    sequence = ids(30)
    expected = model.ops.log_softmax(model.logits(sequence))[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
    assert same_bytes(model.logprobs(sequence), expected)
    assert model.logprobs([5]).shape == (0,)


@pytest.mark.parametrize("given", ["a text", [1.5, 2.0], [[1], [2, 3]], [], [-1], ["a"], [True], object()])
def test_what_is_no_sequence_of_tokens_is_refused(directory, given):
    with pytest.raises(LockstepError, match=r"token"):
        load(directory).logprobs(given)
