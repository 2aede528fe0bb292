"""Offloaded activations: the bytes of autograd's own, away from the device between forward and backward."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lockstep.errors import LockstepError
from lockstep.memory import host
from lockstep.memory.host import Disk, Pinned, in_memory
from lockstep.memory.offload import Offload
from lockstep.train.peak import peak_resident, reset_peak
from tests.processes import answer
from tests.train.allocated import most_allocated

WIDTH, ROWS = 64, 48


class _Block(nn.Module):
    """Saves its input, products' inputs, a view, an integer tensor and, as `table`, what every layer shares."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, generator=draw) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw) / 8)

    def forward(self, ops: None, x: Tensor, table: Tensor) -> Tensor:
        gate, up = (x @ self.up).chunk(2, dim=1)
        order = torch.argsort(x.detach()[:, 0])
        h = (torch.sigmoid(gate) * up)[order] * table
        return x + (h.double() @ self.down.double()).float()


def _plain(layer: int, block: nn.Module, *arguments: Any) -> Tensor:
    y: Tensor = block(*arguments)
    return y


def _run(
    call: Callable[..., Tensor], layers: int, order: list[tuple[str, int]], device: str = "cpu", rows: int = ROWS
) -> list[Tensor]:
    """Gradients of inputs and weights after forwards and backwards of micro-batches in this order."""
    blocks = [_Block(i).to(device) for i in range(layers)]
    table = torch.rand(rows, 1, generator=torch.Generator().manual_seed(99)).to(device)
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for kind, m in order:
        if kind == "F":
            x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + m)).to(device)
            x = inputs[m] = x.requires_grad_()
            for i, block in enumerate(blocks):
                x = call(i, block, None, x, table)
            outputs[m] = x
        else:
            (outputs.pop(m) ** 2).sum().backward()
    grads = [p.grad for block in blocks for p in block.parameters()] + [x.grad for _, x in sorted(inputs.items())]
    return [g for g in grads if g is not None]


@st.composite
def _orders(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Any order of three forwards and their backwards, as schedules have them."""
    waiting, order, forwards = list[int](), list[tuple[str, int]](), 0
    while len(order) < 6:
        if forwards < 3 and (not waiting or draw(st.booleans())):
            order.append(("F", forwards))
            waiting.append(forwards)
            forwards += 1
        else:
            order.append(("B", waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
    return order


@settings(max_examples=30)
@given(st.sets(st.integers(0, 3)), _orders())
def test_any_layers_and_any_order_give_the_bytes_of_plain_autograd(
    tmp_path_factory: pytest.TempPathFactory, layers: set[int], order: list[tuple[str, int]]
) -> None:
    offload = Offload(layers, [0], tmp_path_factory.mktemp("away"))
    expected, found = _run(_plain, 4, order), _run(offload.calling(_plain), 4, order)
    assert len(expected) == len(found) == 4 * 2 + 3
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_at_most_two_layers_of_a_micro_batch_are_on_the_device(tmp_path: Path) -> None:
    """By PyTorch's allocator: what eight layers keep beyond what one keeps, with and without offload."""

    def peak(layers: int, away: int) -> int:
        call = Offload(range(away), [0], tmp_path).calling(_plain)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            _run(call, layers, [("F", 0), ("B", 0)])
        return most_allocated(run)

    one, two = peak(1, 0), peak(2, 0)
    layer = two - one
    assert peak(8, 0) > one + 6.5 * layer
    weights = 8 * sum(p.nbytes for p in _Block(0).parameters()) * 2
    assert peak(8, 8) < one + weights + 1.5 * layer


def test_resident_memory_falls_and_the_file_has_no_name(tmp_path: Path) -> None:
    """Of a whole process: large tensors go back to the system when they are freed."""
    away, plain, size = answer(_resident, tmp_path)
    assert size > 0.2 * 2**30
    # Two of its five layers are on the device at once, and what was freed last is not given back yet.
    assert plain - away > 0.6 * size - host._WORTH
    assert not list(tmp_path.iterdir())


def _resident(folder: Path) -> tuple[int, int, int]:
    """The most bytes resident with and without offload, and those of the file."""
    found = []
    offload = Offload(range(5), [0], folder)
    for call in (offload.calling(_plain), _plain):
        reset_peak()
        _run(call, 5, [("F", 0), ("B", 0)], rows=2**15)
        found.append(peak_resident())
    assert isinstance(offload._place, Disk)
    return found[0], found[1], offload._place.size


def test_memory_goes_back_to_the_system_64_mib_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back comes again page by page, which took longer than a small layer."""
    trims, seen = [], []
    monkeypatch.setattr(host, "_malloc_trim", trims.append)
    disk = Disk(tmp_path)
    for _ in range(8):
        trip = disk.leave([torch.ones(12 * 2**20, dtype=torch.uint8)])
        trip.settle()
        trip.fetch()
        trip.back()
        del trip  # 24 MiB were freed: when they had left, and now
        disk.freed()
        seen.append(len(trims))
    assert seen == [0, 0, 1, 1, 1, 2, 2, 2]


def test_places_in_the_file_are_used_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for _ in range(3):
        trips = [disk.leave([torch.full((10_000,), i, dtype=torch.uint8)]) for i in range(2)]
        for i, trip in enumerate(trips):
            trip.settle()
            trip.fetch()
            assert trip.back()[0].tolist() == [i] * 10_000
        del trips, trip
    assert disk.size == 2 * 12_288


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def full(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LockstepError, match=r"offload_dir: .*(No space left|quota).* GB are free.*offload few"):
        _run(Offload([0, 1], [0], tmp_path).calling(_plain), 3, [("F", 0), ("B", 0)])


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockstepError, match=r"parallel.offload_dir: .*file/away: .*Give a directory"):
        Disk(tmp_path / "file" / "away")


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here: pinned memory was never run")
def test_pinned_memory_gives_the_bytes_of_plain_autograd() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    order = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    offload = Offload([0, 1, 3], [0], Path())
    expected, found = _run(_plain, 4, order, str(device)), _run(offload.calling(_plain), 4, order, str(device))
    assert isinstance(offload._place, Pinned)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


def test_a_directory_in_memory_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    for folder in (tmp_path, Path("/dev/shm")):
        if in_memory(folder.parent) or not folder.is_dir():
            pytest.skip("temporary files are in memory here, or /dev/shm is not there")
        _run(Offload([0], [0], folder, told.append).calling(_plain), 2, [("F", 0), ("B", 0)])
    assert len(told) == 1
    assert "/dev/shm is a directory in memory" in told[0]
