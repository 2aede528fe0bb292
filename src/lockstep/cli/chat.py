"""`lockstep chat`: talk to a model in the terminal, or ask it one question."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.imports import heavy_imports
from lockstep.cli.options import Dtype, ModelArgument, Numerics, Seed, Temperature, TopP
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.serve import Engine, SamplingParams

log = logging.getLogger("lockstep")
Messages = list[dict[str, str]]


def chat(
    model: ModelArgument,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask this, print the answer, end.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: Dtype = "bfloat16",
    numerics: Numerics = "bitwise",
) -> None:
    """Chat with a model; each line of a piped stdin is one turn."""
    from rich.console import Console

    from lockstep.model.source import told
    from lockstep.serve import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    told(model)  # what is wrong with it is told before PyTorch is imported
    with Console(stderr=True).status("loading PyTorch ..."), heavy_imports():
        from lockstep.model import PackedCache, load
        from lockstep.serve import Engine

    with Console(stderr=True).status(f"loading {model} ..."):
        engine = Engine(load(model, dtype=dtype, numerics=numerics, packed=PackedCache(log.info)))
    history: Messages = [] if system is None else [{"role": "system", "content": system}]
    if message is not None:
        _turn(engine, history, message, params)
        return
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"Chatting with {model}. /new forgets the conversation, Ctrl-D ends.", file=sys.stderr)
    while (line := _read("> " if interactive else "")) is not None:
        if line.strip() == "/new":
            history = history[: 1 if system is not None else 0]
        elif line.strip():
            try:
                history = _turn(engine, history, line, params)
            except LockstepError as error:
                if not interactive:
                    raise
                print(f"{error} /new forgets the conversation.", file=sys.stderr)


def _read(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise LockstepError("a line on stdin is not UTF-8 text: convert it to UTF-8 first") from error


def _turn(engine: Engine, history: Messages, message: str, params: SamplingParams) -> Messages:
    """Ask, print the answer as it comes, and give the conversation with both. Ctrl-C ends the answer."""
    from dataclasses import replace

    asked = [*history, {"role": "user", "content": message}]
    ids = engine.model.tokenizer.chat(asked)
    room = max(1, engine.max_length - len(ids))
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    request = engine.add_request(ids, replace(params, max_tokens=wanted))
    answer = ""
    try:
        while engine.has_work():
            for output in engine.step():
                answer += output.text
                print(output.text, end="", flush=True)
                if output.error is not None:
                    raise LockstepError(output.error)
    except KeyboardInterrupt:
        engine.abort(request)
    print()
    return [*asked, {"role": "assistant", "content": answer}]
