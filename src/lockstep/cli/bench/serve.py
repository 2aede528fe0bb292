"""`lockstep bench serve`: our server and its peers under the same load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.bench._output import Document, JsonFile, Quick, publish
from lockstep.cli.options import whole_numbers
from lockstep.cores import usable_cores
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.bench.serving.compare import Sizes

PEERS = Path("~/.cache/lockstep/peers")
_CONTEXT = 2048
"""Tokens of a sequence that vLLM plans for."""


def serve(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias.")] = "smollm2-135m",
    vs: Annotated[str, typer.Option(help="Peers, comma-separated: vllm, llama.cpp, transformers; empty: none.")] = "",
    peers: Annotated[Path, typer.Option(help="Where benchmarks/peers.sh installed them.")] = PEERS,
    clients: Annotated[str, typer.Option(help="How many ask at once, comma-separated: a load for each.")] = "1,8,32",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    long_prompt: Annotated[
        int, typer.Option(min=1, max=1900, help="Tokens of the prompt whose prefill counts.")
    ] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every side is loaded once in each.")] = 3,
    quick: Quick = False,
    json_file: JsonFile = None,
    write: Document = None,
) -> None:
    """Our server beside vLLM, llama.cpp and transformers: latency, throughput, start, memory."""
    from rich.console import Console

    from lockstep.bench import describe
    from lockstep.bench.limit import limit_of
    from lockstep.bench.serving import SIDES, Server, compare
    from lockstep.bench.serving.compare import Sizes
    from lockstep.bench.serving.copies import gguf_copy, hf_copy
    from lockstep.model import load
    from lockstep.ops.device_class import instruction_sets

    at_once = whole_numbers("--clients", clients, "1,8,32")
    names = [name.strip() for name in vs.split(",") if name.strip()]
    for name in names:
        if name not in SIDES or name == "lockstep":
            known = ", ".join(key for key in SIDES if key != "lockstep")
            raise LockstepError(f"--vs names {name!r}, which is no peer: known are {known}.")
    sizes = Sizes((1, 2), 8, 4, 32, 1) if quick else Sizes(at_once, prompt, output, long_prompt, rounds)
    if sizes.prompt + sizes.output > _CONTEXT:
        raise LockstepError(
            f"--prompt {prompt} and --output {output} are more than the {_CONTEXT} tokens of a context."
        )
    command = _command(model, names, Sizes() if quick else sizes)
    loaded = load(model)
    with Console(stderr=True).status("copying the model") as status:
        values = {
            "directory": str(hf_copy(model, loaded)), "gguf": str(gguf_copy(model)) if "llama.cpp" in names else "",
            "peers": str(peers.expanduser()), "clients": str(max(sizes.clients)), "threads": str(usable_cores()),
            "context": str(_CONTEXT), "all_context": str(max(sizes.clients) * _slot(sizes)),
            "last": str(usable_cores() - 1),
            "vllm_dtype": "bfloat16" if "avx512_bf16" in instruction_sets() else "float32",
        }  # fmt: skip
        servers = [Server(SIDES[name], values) for name in ("lockstep", *names)]
        machine = describe()
        status.update("measuring the machine's peaks")
        limit = limit_of(loaded.decoder)
        report = compare(servers, loaded.config.vocab_size, sizes, machine, limit, command, status.update)
    publish(report, json_file, write)


def _slot(sizes: Sizes) -> int:
    """Tokens that each of llama.cpp's slots must hold; it divides its context among them."""
    return -(-max(sizes.prompt + sizes.output, sizes.long_prompt + 1) // 256) * 256


def _command(model: str, names: list[str], sizes: Sizes) -> str:
    """The words that give these sizes again; what is the default is left out."""
    from lockstep.bench.serving.compare import Sizes

    usual, parts = Sizes(), [f"lockstep bench serve {model}"]
    parts += [f"--vs {','.join(names)}"] if names else []
    parts += [f"--clients {','.join(map(str, sizes.clients))}"] if sizes.clients != usual.clients else []
    for option in ("prompt", "output", "long_prompt", "rounds"):
        if getattr(sizes, option) != getattr(usual, option):
            parts.append(f"--{option.replace('_', '-')} {getattr(sizes, option)}")
    return " ".join(parts)
