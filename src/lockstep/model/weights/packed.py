"""Weights as the products read them, kept on disk: a second start maps one file and packs nothing.

An entry is a header (JSON) and tensors. First come those that a forward pass reads: packed weights in the order in
which `Decoder.prepare` packs them, and parameters; then the parameters that only others read, such as an export.
Parameters that are views of the model's own file are not in it. Its name says which model and dtype it is for; within
it stands what made it: our version and sources, and the size and times of the model's files. Where that differs, or the
entry is damaged, the weights are packed again with one line saying so. It is written beside its place and renamed into
it, so that processes that race each see a whole one or none.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.model.weights.fill import Stored
from lockstep.ops import Operators, build
from lockstep.ops.device_class import device_class
from lockstep.ops.linear import PackedWeight
from lockstep.sources import made_by

_ALIGN = 4096
"""Bytes at whose multiples tensors begin, and of which each is summed up for the checksum: a page."""
_SPARE = 2**30
"""Bytes of the disk that are left free."""
_SMALL = 2**24
"""Bytes of a model that is packed sooner than a file is opened; smaller ones are not kept."""
_LEFTOVER = 3600.0
"""Seconds after which a file that is still being written belongs to a process that was killed."""
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}

Note = Callable[[str], None]


@dataclass(frozen=True)
class PackedModel:
    """An entry that fits: a mapped file. parameters: by the decoder's names."""

    packs: Sequence[PackedWeight]
    parameters: Mapping[str, Tensor]

    def over(self, found: Mapping[str, Stored], names: Mapping[str, str]) -> dict[str, Stored]:
        """The model file's tensors, with ours in place of those that would have to be converted, or cut."""
        ours = {names[name]: _stored(found[names[name]], tensor) for name, tensor in self.parameters.items()}
        return {**found, **ours}

    def operators(self, ops: Operators) -> Operators:
        """Operators whose `pack` gives what is here, in order, instead of packing; for one `Decoder.prepare`."""
        packs = iter(self.packs)

        def pack(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
            packed = next(packs)
            kept, asked = (packed.n, packed.panels.shape[1], packed.panels.dtype), (*weight.shape, dtype)
            assert kept == asked, f"the packed weight is {kept}, the decoder's {asked}"
            return packed

        return replace(ops, pack=pack)


class PackedCache:
    """Packed models in a directory, by default `lockstep/weights` under XDG_CACHE_HOME or ~/.cache.

    limit: bytes that the entries may take together; the least recently used go first. small: bytes below which a
    model is not kept. note: is told, in a line, why an entry is not used or not kept.
    """

    def __init__(self, note: Note, limit: int = 16 * 2**30, directory: Path | None = None, small: int = _SMALL) -> None:
        self.directory, self.limit, self.small = directory or packed_dir(), limit, small
        self._note = note

    def load(self, source: Path, files: Sequence[Path], dtype: torch.dtype, place: str = "") -> PackedModel | None:
        """What is kept of the model at `source`, whose weights and configuration are `files`, in this dtype. place: of
        the part of it that one of several processes holds (`Part.place`)."""
        path = self._path(source, dtype, place)
        try:
            found = _read(path, _maker(source, files, dtype))
            os.utime(path)
            return found
        except FileNotFoundError:
            return None
        except _Refused as refused:
            self._note(f"the packed weights {path} are not used: {refused}; packing again")
        except OSError as error:
            self._note(f"the packed weights {path} cannot be read ({error.strerror or error}); packing again")
        return None

    def store(
        self, source: Path, files: Sequence[Path], dtype: torch.dtype, packs: Sequence[PackedWeight],
        read: Mapping[str, Tensor], spare: Mapping[str, Tensor], place: str = "",
    ) -> None:  # fmt: skip
        """Keep packed weights and the parameters that are not views of a file: those that a forward pass reads, and
        those that it does not. A disk that refuses costs a line, not the start."""
        tensors = [_Tensor("", pack.panels, pack.n) for pack in packs]
        tensors += [_Tensor(name, tensor.detach(), 0) for name, tensor in [*read.items(), *spare.items()]]
        size = sum(_padded(t.tensor.nbytes) for t in tensors)
        path = self._path(source, dtype, place)
        if size < self.small:
            return None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if size > self.limit or size + _SPARE > shutil.disk_usage(self.directory).free:
                room = "on the disk" if size <= self.limit else f"within the cache's {self.limit / 1e9:.3g} GB"
                return self._note(f"the packed weights ({size / 1e9:.3g} GB) are not kept: there is no room {room}")
            self._make_room(self.limit - size, path)
            about = {"made_by": _maker(source, files, dtype), "model": f"{source} {place}".rstrip()}
            handle, name = tempfile.mkstemp(prefix="new-", dir=self.directory)
            try:
                checked = sum(_padded(t.tensor.nbytes) for t in tensors[: len(packs) + len(read)])
                _write(handle, tensors, checked, about)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            self._note(f"the packed weights are not kept in {self.directory}: {error.strerror or error}")

    def _path(self, source: Path, dtype: torch.dtype, place: str) -> Path:
        name = "\0".join([str(source.resolve()), str(dtype), device_class(), place])
        return self.directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.packed"

    def _make_room(self, limit: int, new: Path) -> None:
        """Remove the least recently used entries until the others fit; one that is in use stays in memory."""
        for path in self.directory.glob("new-*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _LEFTOVER:
                    path.unlink()
        kept = sorted((path.stat().st_mtime, path.stat().st_size, path) for path, *_ in entries(self.directory))
        total = sum(size for _, size, path in kept if path != new)
        for _, size, path in kept:
            if total <= limit:
                return
            if path != new:
                path.unlink(missing_ok=True)
                total -= size


def recorded(ops: Operators, packs: list[PackedWeight]) -> Operators:
    """Operators that pack, and put what they packed into this list."""

    def pack(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
        packs.append(ops.pack(weight, dtype))
        return packs[-1]

    return replace(ops, pack=pack)


def packed_dir() -> Path:
    """Where packed weights lie, beside the kernels."""
    return build.cache_dir().parent / "weights"


def entries(directory: Path) -> Iterator[tuple[Path, str, int]]:
    """Path, model and bytes of every entry in a directory."""
    for path in sorted(directory.glob("*.packed")):
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            try:
                with open(path, "rb") as file:
                    yield path, str(_header(file.read(2**24))[0]["model"]), size
            except (OSError, ValueError, KeyError, TypeError):
                yield path, "damaged", size


class _Refused(Exception):
    """An entry that does not count, and why."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of an entry. name: the parameter's, "" for panels of a weight of n rows."""

    name: str
    tensor: Tensor
    n: int


def _maker(source: Path, files: Sequence[Path], dtype: torch.dtype) -> dict[str, Any]:
    """What an entry depends on. The times of a file's content and of its entry in the directory tell every change, and
    its bytes need not be read."""
    known = [(file.stat(), file) for file in files]
    about = [[str(file), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s, file in known]
    return {"by": made_by("ops", "model"), "torch": torch.__version__, "class": device_class(), "files": about}


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _write(handle: int, tensors: Sequence[_Tensor], checked: int, about: dict[str, Any]) -> None:
    """The whole entry into an open file, down to the disk."""
    with os.fdopen(handle, "wb") as file:
        *starts, end = accumulate((_padded(one.tensor.nbytes) for one in tensors), initial=0)
        places = [
            [one.name, str(one.tensor.dtype), list(one.tensor.shape), one.n, at]
            for one, at in zip(tensors, starts, strict=True)
        ]
        head = {**about, "tensors": places, "bytes": end, "checked": checked, "sum": "0" * 64}
        start = _padded(8 + len(json.dumps(head)))
        for one, at in zip(tensors, starts, strict=True):
            file.seek(start + at)
            file.write(one.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.truncate(start + end)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            head["sum"] = _sum(data, start, checked)
        text = json.dumps(head).encode()
        file.seek(0)
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, maker: dict[str, Any]) -> PackedModel:
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if os.fstat(file.fileno()).st_size else b""
    try:
        head, start = _header(data)
        made = head["made_by"]
        if made != maker:
            other = made["files"] != maker["files"]
            raise _Refused("the model's files have changed" if other else "they were made by another Lockstep")
        if len(data) != start + head["bytes"] or head["sum"] != _sum(data, start, head["checked"]):
            raise _Refused("they are damaged")
        found = [_tensor(data, start, place) for place in head["tensors"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _Refused("they are damaged") from error
    packs = [PackedWeight(one.tensor, one.n) for one in found if not one.name]
    return PackedModel(packs, {one.name: one.tensor for one in found if one.name})


def _header(data: bytes | mmap.mmap) -> tuple[dict[str, Any], int]:
    """(the header, where the tensors begin)."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("there is no header")
    return json.loads(data[8 : 8 + length]), _padded(8 + length)


def _tensor(data: bytes | mmap.mmap, start: int, place: list[Any]) -> _Tensor:
    name, dtype, shape, n, at = place
    count = int(np.prod(shape))
    tensor = torch.frombuffer(data, dtype=_DTYPES[dtype], count=count, offset=start + at) if count else torch.empty(0)
    return _Tensor(name, tensor.view(shape), n)


def _sum(data: bytes | mmap.mmap, start: int, count: int) -> str:
    """A checksum at the speed of memory: the SHA-256 of each page's sum. It is there for disks that lose pages and
    files that were cut, not for attackers: who can write here can write the model."""
    words = np.frombuffer(data, dtype=np.uint64, count=count // 8, offset=start).reshape(-1, _ALIGN // 8)
    return hashlib.sha256(words.sum(axis=1, dtype=np.uint64).tobytes()).hexdigest()


def _stored(whole: Stored, tensor: Tensor) -> Stored:
    return Stored(whole.shape, lambda: tensor, view=True, taken=True)
