"""The model as every server is given it, kept between runs: their own caches (of packed weights, of compiled programs)
go by its place and its times, so a start is a warm one where the run before made them."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep.bench.serving.gguf_copy import copy_as_f16
from lockstep.errors import LockstepError
from lockstep.model import Model
from lockstep.model.source import resolve
from lockstep.ops import build


def hf_copy(name: str, model: Model, root: Path | None = None) -> Path:
    """A Hugging Face directory of the model called `name`, in its compute dtype."""
    source = resolve(name)
    return _kept(source, str(model.dtype), root, lambda target: model.save(target))


def gguf_copy(name: str, root: Path | None = None) -> Path:
    """Its weights as a float16 GGUF file; LockstepError where they do not come from a GGUF file."""
    source = resolve(name)
    if source.suffix != ".gguf":
        raise LockstepError(f"llama.cpp needs a GGUF file, and {name} is none: name a .gguf file, or leave it out.")
    return _kept(source, "f16.gguf", root, lambda target: copy_as_f16(source, target))


def _kept(source: Path, form: str, root: Path | None, make: Callable[[Path], None]) -> Path:
    """What `make` writes, from this state of the source; renamed into its place when it is whole."""
    root = root or build.cache_dir().parent / "bench"
    about = f"{source.resolve()}\0{source.stat().st_mtime_ns}\0{form}"
    target = root / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}-{source.stem}-{form}"
    if not target.exists():
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="new-", dir=root))
        try:
            make(folder / "copy")
            (folder / "copy").replace(target)
        finally:
            shutil.rmtree(folder)
    return target
