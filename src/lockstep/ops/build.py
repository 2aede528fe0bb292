"""Build the C++ extension on first use, and load it.

The library lies in the user's cache under a key of sources, compiler, PyTorch and instruction set, so a change of
any of them builds anew and never loads a stale file. A build happens in a private folder under a file lock and is
renamed into place: two processes that start at once build once, and a killed build leaves nothing behind. Object files
are kept under keys of their own, so that an edit of one source compiles that source alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from lockstep.errors import LockstepError
from lockstep.ops.device_class import AMX_CLASS, BF16_CLASS, device_class

CSRC = Path(__file__).parent / "csrc"
_COMMON = ["-std=c++20", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"]
_AVX2 = ["-mavx2", "-mfma"]
_PAIRS = ["-DLOCKSTEP_BF16_PAIRS"]
"""Products of bfloat16 by pairs: the device class cpu-avx512-bf16 (`csrc/pairs16.h`)."""
_TILES = ["-DLOCKSTEP_BF16_TILES"]
"""Products of bfloat16 by tiles: the device class cpu-amx-bf16 (`csrc/tiles.h`)."""
_SIMDE = ["-DLOCKSTEP_EMULATE_AVX512", "-Wno-psabi", "-fno-tree-sra"]
"""The AVX-512 code over AVX2, by SIMDe (Debian: apt install libsimde-dev). GCC 12 fails within that pass of it."""
_ISA = {
    "amx-bf16": [*_AVX512, "-mamx-tile", "-mamx-bf16", *_TILES],
    "avx512-bf16": [*_AVX512, "-mavx512bf16", *_PAIRS],
    "avx512": _AVX512,
    "avx2": _AVX2,
    "plain": [],
}
EMULATED = {
    "amx-bf16-on-avx2": [*_AVX2, *_SIMDE, *_TILES],
    "avx512-bf16-on-avx2": [*_AVX2, *_SIMDE, *_PAIRS],
    "avx512-on-avx2": [*_AVX2, *_SIMDE],
    "avx2-pairs": [*_AVX2, *_PAIRS],
    "plain-pairs": _PAIRS,
    "avx2-tiles": [*_AVX2, *_TILES],
    "plain-tiles": _TILES,
}
"""What runs code, or gives bits, of processors that this one is not: for tests, many times slower."""
_FAST = (
    "use plain PyTorch with --numerics fast (in training: --set train.numerics=fast), which does not keep the bit "
    "contract."
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path and the first line of its `--version`."""

    path: str
    version: str


@lru_cache
def load(isa: str | None = None) -> str:
    """Load the extension into `torch.ops.lockstep`, building it if need be; returns the instruction set used.

    isa: "amx-bf16", "avx512-bf16", "avx512", "avx2", "plain" or one of `EMULATED`; None: the best this machine has.
    Raises LockstepError when there is no compiler or the build fails. Only one can be loaded in a process.
    """
    device_class()  # asks the system for tile registers, without which those kernels end the process
    isa = isa or best_isa()
    torch.ops.load_library(str(library(isa)))
    return isa


def library(isa: str) -> Path:
    """The path of the built extension for an instruction set; builds it when the cache lacks it."""
    compiler = find_compiler()
    key = _key(compiler, isa)
    target = cache_dir() / f"{isa}-{key}"
    built = target / "liblockstep.so"
    if not built.exists():
        try:
            with _locked(target.with_suffix(".lock")):
                if not built.exists():
                    _build(compiler, isa, target)
        except OSError as error:
            raise LockstepError(
                f"The kernels cannot be put into {target.parent}: {error.strerror or error}. Name a directory that "
                f"can be written with XDG_CACHE_HOME, or {_FAST}"
            ) from error
    return built


def is_built(isa: str) -> bool:
    """Whether the extension for this instruction set is in the cache (False, too, without a compiler)."""
    try:
        return (cache_dir() / f"{isa}-{_key(find_compiler(), isa)}" / "liblockstep.so").exists()
    except LockstepError:
        return False


def best_isa() -> str:
    """The best instruction set this processor and PyTorch agree on, within the machine's device class."""
    by_class = {AMX_CLASS: "amx-bf16", BF16_CLASS: "avx512-bf16"}
    by_capability = {"AVX512": "avx512", "AVX2": "avx2"}
    return by_class.get(device_class()) or by_capability.get(torch.backends.cpu.get_cpu_capability(), "plain")


def cache_dir() -> Path:
    """Where built extensions lie: `lockstep/ext` under XDG_CACHE_HOME, by default ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if root.startswith("~"):
        raise LockstepError(
            f"There is no home directory to put the kernels into: set HOME or XDG_CACHE_HOME, or {_FAST}"
        )
    return Path(root) / "lockstep" / "ext"


@lru_cache
def find_compiler() -> Compiler:
    """The compiler named by CXX, or g++, or clang++ on the PATH; LockstepError when there is none."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++"]:
        path = shutil.which(name)
        if path:
            run = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if run.returncode == 0:
                return Compiler(path, run.stdout.splitlines()[0])
    raise LockstepError(
        f"No C++ compiler found (looked for {named or 'g++ and clang++'} on the PATH). The kernels behind "
        f"`numerics: bitwise` are built on first use. Install one (Debian: `apt install g++`), name yours with CXX, or "
        f"{_FAST}"
    )


def _sources() -> list[Path]:
    return sorted(CSRC.glob("*.cpp"))


def _key(compiler: Compiler, isa: str, source: Path | None = None) -> str:
    """The key of the extension, or of one source's object: that source and the headers it includes."""
    digest = hashlib.sha256()
    files = sorted(CSRC.iterdir() if source is None else _with_headers(source))
    known = [(file.name, file.read_bytes()) for file in files]
    flags = _flags(isa, b"".join(text for _, text in known))
    for part in [compiler.path, compiler.version, torch.__version__, sys.version, *_COMMON, *flags]:
        digest.update(part.encode() + b"\0")
    for name, text in known:
        digest.update(name.encode() + b"\0" + text)
    return digest.hexdigest()[:16]


def _flags(isa: str, text: bytes) -> list[str]:
    """What the compiler is told for a source and its headers: of a build's flags those that the text can depend on, so
    that builds share the other objects."""
    flags = _ISA[isa] if isa in _ISA else EMULATED[isa]
    vectors = b"__AVX2__" in text
    return [flag for flag in flags if (flag[2:].encode() in text if flag.startswith("-D") else vectors)]


def _with_headers(source: Path) -> set[Path]:
    """A source and what it includes of ours, and those in turn."""
    found, left = set(), [source]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += [file.parent / name for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE)]
    return found


def _build(compiler: Compiler, isa: str, target: Path) -> None:
    print(f"Building the {isa} kernels with {compiler.version} (once, about a minute) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as work:
        _compile(compiler, isa, Path(work))
        done = Path(work) / "done"
        done.mkdir()
        os.rename(Path(work) / "liblockstep.so", done / "liblockstep.so")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(done, target)


def _compile(compiler: Compiler, isa: str, work: Path) -> None:
    """Compile what is not there yet, as many sources at once as there are cores, then link."""
    from torch.utils.cpp_extension import library_paths

    kept = cache_dir().parent / "objects"
    kept.mkdir(exist_ok=True)
    objects = {source: kept / f"{source.stem}-{_key(compiler, isa, source)}.o" for source in _sources()}
    missing = [(source, target) for source, target in objects.items() if not target.exists()]
    missing.sort(key=lambda pair: not _reads_pytorch(pair[0]))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: _compile_one(compiler, isa, work, *pair), missing))
    libraries = [f"-L{path}" for path in library_paths()]
    link = [compiler.path, "-shared", "-fopenmp", *map(str, objects.values()), *libraries, "-lc10", "-ltorch_cpu"]
    _run([*link, "-o", str(work / "liblockstep.so")])


def _reads_pytorch(source: Path) -> bool:
    """Whether a source includes PyTorch's headers: it takes four times as long as others, so it is begun first."""
    return any(b"#include <torch/" in file.read_bytes() for file in _with_headers(source))


def _compile_one(compiler: Compiler, isa: str, work: Path, source: Path, target: Path) -> None:
    from torch.utils.cpp_extension import include_paths

    includes = [f"-isystem{path}" for path in include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    own = work / target.name
    flags = _flags(isa, b"".join(file.read_bytes() for file in _with_headers(source)))
    _run([compiler.path, *_COMMON, *flags, abi, *includes, "-fPIC", "-c", str(source), "-o", str(own)])
    os.rename(own, target)


def _run(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise LockstepError(
            f"The kernels could not be built: {' '.join(command[:1] + command[-3:])} ended with {run.returncode}.\n"
            f"{run.stderr[-2000:]}\n"
            f"A C++20 compiler is needed (g++ 11 or newer); or {_FAST}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the system when the process ends, however it ends
        yield
