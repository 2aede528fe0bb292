"""What ranks say to each other in serving, with ranks as threads: orders arrive as they were given, logits whole."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.model.model import Model
from lockstep.ops import Packed, Paged, operators
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.head import shared_head
from lockstep.parallel.mesh import MeshShape
from lockstep.serve.tp.fit import partition
from lockstep.serve.tp.orders import Lead, follow, receive_weights
from tests.ranks_as_threads import on_threads
from tests.serve.tiny import tiny_model


def batches() -> st.SearchStrategy[tuple[Tensor, Paged, Tensor]]:
    @st.composite
    def draw(pick: st.DrawFn) -> tuple[Tensor, Paged, Tensor]:
        lengths = pick(st.lists(st.integers(1, 70), min_size=1, max_size=5))
        count, whole = sum(lengths), Packed.of(lengths)
        tokens = torch.tensor(pick(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)))
        rows = torch.tensor(sorted(pick(st.sets(st.integers(0, count - 1)))), dtype=torch.int64)
        table = torch.randint(0, 2**31 - 1, (len(lengths), pick(st.integers(1, 9))), dtype=torch.int32)
        return tokens, Paged(whole.positions + 64, whole.starts, table), rows

    return draw()


@settings(max_examples=40, deadline=None)
@given(st.lists(batches(), min_size=1, max_size=4), st.sampled_from([2, 3]))
def test_passes_arrive_as_they_were_told(passes, size):
    def work(mesh: Mesh) -> list[tuple[Tensor, Paged, Tensor]]:
        axis = mesh["tp"]
        if mesh.rank:
            return [follow(axis) for _ in passes]
        lead = Lead(axis)
        for one in passes:
            lead.tell_pass(*one)
        return passes

    first, *others = on_threads(MeshShape(tp=size), work)
    for heard in others:
        for (tokens, batch, rows), (tokens_, batch_, rows_) in zip(first, heard, strict=True):
            assert type(batch) is type(batch_)
            assert torch.equal(tokens, tokens_)
            assert torch.equal(rows, rows_)
            assert tokens_.dtype == rows_.dtype == torch.int64
            for name, value in vars(batch).items():
                assert torch.equal(value, getattr(batch_, name))
                assert value.dtype == getattr(batch_, name).dtype


def test_each_rank_gets_its_own_slices_in_the_dtype_that_it_keeps():
    whole = dict(tiny_model(num_heads=8, num_kv_heads=4, head_dim=16, canonical_tp=4).decoder.named_parameters())
    config = tiny_model(num_heads=8, num_kv_heads=4, head_dim=16, canonical_tp=4).config

    def work(mesh: Mesh) -> dict[str, Tensor]:
        part = partition(config, mesh, "bitwise")
        own = {name: part.take(name, tensor).detach().bfloat16() for name, tensor in whole.items()}
        if mesh.rank:
            assert follow(mesh["tp"]) is None
            found = receive_weights(mesh["tp"], own)
            assert all(torch.equal(found[name], own[name]) for name in own)
            assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
        else:
            Lead(mesh["tp"]).tell_weights(own, lambda rank, name: part.slice_of(rank, name, whole[name]))
        return own

    ranks = on_threads(MeshShape(tp=4), work)
    down = torch.cat([own["layers.0.mlp.down.weight"] for own in ranks], dim=1)
    assert torch.equal(down, whole["layers.0.mlp.down.weight"].bfloat16())


@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_by_parts_of_the_vocabulary_are_the_heads_bytes(softcap, numerics):
    """Of 101 tokens, which four ranks cannot share out evenly; with one row and with many. Under `fast` PyTorch's
    product of another width may round differently."""
    decoder = tiny_model(vocab_size=101, logit_softcap=softcap).decoder
    model = Model(decoder, None, operators(numerics), torch.bfloat16)
    hidden = torch.randn(37, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def work(mesh: Mesh) -> list[Tensor]:
        cut = {"vocabulary": shared_head(model.ops, mesh["tp"], 101)}
        ops, own = replace(model.ops, cut=cut), copy.deepcopy(decoder)
        with torch.inference_mode():
            plain = own.head(ops, hidden[:37])
            own.prepare(ops, torch.bfloat16)
            return [plain, *(own.head(ops, hidden[:rows]) for rows in (1, 37))]

    with torch.no_grad():
        expected = [decoder.head(model.ops, hidden[:rows]) for rows in (37, 1, 37)]
    for found, right in zip(on_threads(MeshShape(tp=4), work)[0], expected, strict=True):
        if numerics == "bitwise":
            assert torch.equal(found.view(torch.int32), right.view(torch.int32))
        else:
            torch.testing.assert_close(found, right)
