"""Slabs of large pages: tensors apart, aligned, freed; a packed weight in them has the same bytes."""

from __future__ import annotations

import gc
import mmap
import weakref

import torch

from lockstep.ops import operators
from lockstep.ops.huge_pages import HugePages
from lockstep.ops.linear import pack


def test_tensors_share_a_slab_lie_apart_and_begin_at_lines():
    memory = HugePages(slab=4096)
    shapes = [((3,), torch.float32), ((5, 7), torch.bfloat16), ((1,), torch.uint8), ((100,), torch.float32)]
    tensors = [memory.empty(shape, dtype) for shape, dtype in shapes]
    for i, (x, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert (tuple(x.shape), x.dtype) == (shape, dtype)
        assert x.data_ptr() % 64 == 0
        x.fill_(i + 1)
    assert all((x == i + 1).all() for i, x in enumerate(tensors)), "no tensor lies in another"
    assert tensors[-1].data_ptr() - tensors[0].data_ptr() == (1 + 2 + 1) * 64


def test_what_does_not_fit_gets_a_slab_of_its_own_and_the_rest_is_used_on():
    memory = HugePages(slab=4096)
    first, large, second = (memory.empty((count,), torch.uint8) for count in (64, 5000, 64))
    assert second.data_ptr() - first.data_ptr() == 64
    assert len(large.fill_(7)) == 5000
    next_slab = memory.empty((4000,), torch.uint8)
    assert next_slab.fill_(1).sum() == 4000
    assert large.sum() == 35000


def test_a_slab_is_freed_with_its_last_tensor(monkeypatch):
    slabs = []

    class Watched(mmap.mmap):
        def __init__(self, *arguments, **named):
            slabs.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    memory = HugePages(slab=4096)
    first, second, other = (memory.empty((2048,), torch.uint8) for _ in range(3))
    assert [slab() is not None for slab in slabs] == [True, True]
    del first
    gc.collect()
    assert slabs[0]() is not None, "the second tensor lies in it"
    del second
    gc.collect()
    assert [slab() is not None for slab in slabs] == [False, True]
    assert other.fill_(1).sum() == 2048


def test_packed_to_be_kept_or_for_a_call_the_bytes_are_the_same():
    ops = operators("bitwise")
    weight = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32):
        kept, once = ops.pack(weight, dtype), pack(weight, dtype)
        assert kept.n == once.n == 50
        assert torch.equal(kept.panels.view(torch.uint8), once.panels.view(torch.uint8))
    assert ops.pack(weight.to("meta"), torch.bfloat16).panels.is_meta
