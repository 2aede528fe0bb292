"""Offload of activations: what a layer keeps for its backward leaves the device meanwhile.

    forward of layer i      what its operators save is collected, and copied out while layer i + 1 computes
    forward of layer i + 1  when it is over, so is the copy: the device memory of layer i's activations is free
    backward of layer i + 1 when it begins, layer i's begin to come back
    backward of layer i     waits for them, and drops them when it is over

Whole storages move, byte by byte, each once, whoever saved it. Weights, the batch and its tables stay. So at most two
offloaded layers of one micro-batch are on the device at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lockstep.memory.host import Disk, Place, Trip, in_memory, place_for
from lockstep.model.decoder import BlockCall
from lockstep.parallel.boundary import passed


class Offload:
    """The offloaded layers of one rank. layers: which; starts: the first layer of every group of layers, into which
    activations come as messages; folder: for what a CPU offloads; note: takes a line for the user."""

    def __init__(
        self, layers: Collection[int], starts: Collection[int], folder: Path, note: Callable[[str], None] = print
    ) -> None:
        self.layers, self.starts, self.folder = frozenset(layers), frozenset(starts), folder
        self.note = note
        self._place: Place | None = None
        self._leaving: _Kept | None = None
        self._before: _Kept | None = None

    def calling(self, call: BlockCall) -> BlockCall:
        """Blocks called as by `call`, these layers' activations away until their backward."""

        def wrapped(layer: int, block: nn.Module, ops: Any, x: Tensor, *rest: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return call(layer, block, ops, x, *rest)
            below = None if layer in self.starts else self._before
            if layer in self.layers:
                y, kept = self._away(call, layer, block, ops, x, rest)
            else:
                y, kept = call(layer, block, ops, x, *rest), None
                self._settle()
            self._before, self._leaving = kept, kept or self._leaving
            return passed(y, lambda: self._begin(kept, below)) if kept or below else y

        return wrapped

    def _away(
        self, call: BlockCall, layer: int, block: nn.Module, ops: Any, x: Tensor, rest: tuple[Any, ...]
    ) -> tuple[Tensor, _Kept]:
        stays = _storages([*block.parameters(), *_tensors(rest)])
        if layer in self.starts and layer > 0:
            stays |= _storages([x])  # the message that it came as is kept anyway
        kept = _Kept(stays)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            y = call(layer, block, ops, passed(x, lambda: self._done(kept)), *rest)
        self._settle()
        kept.leave(self._place_for(x.device))
        return y, kept

    def _begin(self, kept: _Kept | None, below: _Kept | None) -> None:
        """A layer's backward begins: its own activations must be on their way, the next one's may be."""
        if self._leaving is not None and self._leaving is not kept:
            self._settle()
        for one in (kept, below):
            if one is not None:
                one.fetch()

    def _settle(self) -> None:
        """The layer that left last has left: its memory is free."""
        if self._leaving is not None:
            self._leaving.settle()
            self._leaving = None
            self._freed()

    def _done(self, kept: _Kept) -> None:
        """A layer's backward is over."""
        kept.drop()
        self._freed()

    def _freed(self) -> None:
        if self._place is not None:
            self._place.freed()

    def _place_for(self, device: torch.device) -> Place:
        if self._place is None:
            self._place = place_for(device, self.folder)
            if isinstance(self._place, Disk) and in_memory(self.folder):
                self.note(
                    f"parallel.offload_dir: {self.folder} is a directory in memory, so offloading into it saves none: "
                    "give one on a disk"
                )
        return self._place


@dataclass(frozen=True)
class _Saved:
    """A tensor that an operator saved: a part of the index-th storage."""

    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept:
    """What one call of a layer keeps for its backward. stays: storages that are not moved."""

    def __init__(self, stays: set[int]) -> None:
        self._stays = stays
        self._index: dict[int, int] = {}
        self._here: list[Tensor] = []  # the storages' bytes, on the device; empty while they are away
        self._trip: Trip | None = None
        self._coming = False

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage._cdata in self._stays or size == 0 or size % tensor.itemsize:
            return tensor
        index = self._index.setdefault(storage._cdata, len(self._here))
        if index == len(self._here):
            whole = tensor.detach().as_strided((size // tensor.itemsize,), (1,), 0)
            self._here.append(whole.view(torch.uint8))
        return _Saved(index, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not self._here:
            assert self._trip is not None
            self.fetch()
            self._here, self._trip = self._trip.back(), None
        whole = self._here[saved.index].view(saved.dtype)
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    def leave(self, place: Place) -> None:
        if self._here:
            self._trip = place.leave(self._here)

    def settle(self) -> None:
        if self._trip is not None and self._here:
            self._trip.settle()
            self._here = []

    def fetch(self) -> None:
        if self._trip is not None and not self._here and not self._coming:
            self._trip.fetch()
            self._coming = True

    def drop(self) -> None:
        """Nothing of it is needed any more."""
        self._here, self._trip = [], None


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among a block's arguments, and those of its batch."""
    found: list[Tensor] = []
    for value in arguments:
        if isinstance(value, Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += _tensors(getattr(value, field.name) for field in fields(value))
    return found
