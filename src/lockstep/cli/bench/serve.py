"""`lockstep bench serve`: our server and its peers under the same load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.cores import usable_cores
from lockstep.errors import LockstepError

PEERS = Path("~/.cache/lockstep/peers")


def serve(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias.")] = "smollm2-135m",
    vs: Annotated[str, typer.Option(help="Peers, comma-separated: vllm, llama.cpp, transformers; empty: none.")] = "",
    peers: Annotated[Path, typer.Option(help="Where benchmarks/peers.sh installed them.")] = PEERS,
    clients: Annotated[str, typer.Option(help="How many ask at once, comma-separated: a load for each.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(help="Rounds; every side is loaded once in each.")] = 3,
    quick: Quick = False,
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """Our server beside vLLM, llama.cpp and transformers: latency, throughput, start, memory."""
    import tempfile

    from rich.console import Console

    from lockstep.bench import describe
    from lockstep.bench.serving import SIDES, Server, compare
    from lockstep.bench.serving.compare import Sizes
    from lockstep.model import load
    from lockstep.ops.device_class import instruction_sets

    counts = _counts(clients)
    names = [name.strip() for name in vs.split(",") if name.strip()]
    for name in names:
        if name not in SIDES or name == "lockstep":
            known = ", ".join(key for key in SIDES if key != "lockstep")
            raise LockstepError(f"--vs names {name!r}, which is no peer: known are {known}.")
    sizes = Sizes((1, 2), 8, 4, 32, 1) if quick else Sizes(counts, rounds=rounds)
    command = f"lockstep bench serve {model}" + (f" --vs {','.join(names)}" if names else "")
    loaded = load(model)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder, Console(stderr=True).status("") as status:
        directory = Path(folder) / "model"
        loaded.save(directory)
        values = {
            "directory": str(directory), "peers": str(peers.expanduser()), "clients": str(max(sizes.clients)),
            "context": "2048", "all_context": str(2048 + 256 * max(sizes.clients)), "threads": str(usable_cores()),
            "last": str(usable_cores() - 1),
            "vllm_dtype": "bfloat16" if "avx512_bf16" in instruction_sets() else "float32",
            "gguf": _gguf(model, Path(folder)) if "llama.cpp" in names else "",
        }  # fmt: skip
        servers = [Server(SIDES[name], values) for name in ("lockstep", *names)]
        report = compare(servers, loaded.config.vocab_size, sizes, describe(), command, status.update)
    publish(report, json_file, write)


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise LockstepError(f"--clients is {text!r}: give whole numbers from 1, such as 1,8,32.")
    return tuple(int(part) for part in parts)


def _gguf(model: str, folder: Path) -> str:
    """The same weights as a float16 GGUF."""
    from lockstep.bench.serving.gguf_copy import copy_as_f16
    from lockstep.model.loading import resolve

    source = resolve(model)
    if Path(source).suffix != ".gguf":
        raise LockstepError(f"llama.cpp needs a GGUF file, and {model} is none: name a .gguf file, or leave it out.")
    target = folder / "model-f16.gguf"
    copy_as_f16(Path(source), target)
    return str(target)
