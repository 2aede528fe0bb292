"""`lockstep generate`: complete one prompt, or a file of them as one batch."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.cli.imports import heavy_imports
from lockstep.cli.options import Dtype, ModelArgument, Numerics, Seed, Temperature, TopP
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.serve import Completion, SamplingParams

log = logging.getLogger("lockstep")


def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeatable.")] = None,
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help='JSON lines: {"prompt": ...} with sampling parameters, if any.')
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where JSON lines go; default: stdout.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: Annotated[int, typer.Option(help="The k most probable tokens; 0: all.")] = 0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Log-probabilities in the JSON lines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines also for --prompt.")] = False,
    tp: Annotated[int, typer.Option(help="Processes that share the model.", min=1)] = 1,
    dtype: Dtype = "bfloat16",
    numerics: Numerics = "bitwise",
) -> None:
    """Complete prompts and print the text."""
    from rich.console import Console

    from lockstep.serve.check import check_model

    if bool(prompt) == (input is not None):
        raise LockstepError("give the prompts in one way: --prompt TEXT (repeatable), or --input FILE of JSON lines.")
    defaults = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
        "stop": tuple(stop or ()), "logprobs": 0 if logprobs else None,
    }  # fmt: skip
    rows = {f"prompt {i}": {"prompt": text} for i, text in enumerate(prompt, 1)} if prompt else _rows(input)
    params = [_params(row, defaults, where) for where, row in rows.items()]
    _write(output, [], "a")  # before the work, which may take hours: whether it can be written
    check_model(model, tp, numerics)
    with Console(stderr=True).status("loading PyTorch ..."), heavy_imports():
        from lockstep.model import PackedCache
        from lockstep.serve import Engine
        from lockstep.serve.tp import open_model

    with Console(stderr=True).status(f"loading {model} ...") as status:
        engine = Engine(open_model(model, tp, dtype, numerics, packed=PackedCache(log.info)))
        status.update(f"completing {len(rows)} prompt{'s' if len(rows) > 1 else ''} ...")
        completions = engine.generate([row["prompt"] for row in rows.values()], params)
        engine.close()
    if output is None and not as_json and input is None:
        for completion in completions:
            print(completion.text)
    else:
        _write(output, completions)
    failed = [completion for completion in completions if completion.error is not None]
    if failed:
        raise LockstepError(f"{len(failed)} of {len(completions)} completions were not finished: {failed[0].error}")


def _rows(file: Path | None) -> dict[str, dict[str, Any]]:
    """By the line that each stands in."""
    assert file is not None
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise LockstepError(f"{file} is not UTF-8 text (byte {error.start}): convert it to UTF-8 first") from error
    except OSError as error:
        raise LockstepError(f"cannot read {file}: {error.strerror or error}") from error
    numbered = {f"{file}, line {number}": line for number, line in enumerate(lines, 1) if line.strip()}
    rows = {where: _row(line, where) for where, line in numbered.items()}
    if not rows:
        raise LockstepError(f"{file} holds no prompts: write one JSON object per line")
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LockstepError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or "prompt" not in row:
        keys = f", not one with the keys {', '.join(row)}" if isinstance(row, dict) and row else ""
        raise LockstepError(f'{where}: expected an object such as {{"prompt": "Once upon a time"}}{keys}')
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise LockstepError(f"{where}: the prompt is {prompt!r:.60}, expected a text or a list of token ids")
    return row


def _params(row: dict[str, Any], defaults: dict[str, Any], where: str) -> SamplingParams:
    from dataclasses import fields

    from pydantic import TypeAdapter, ValidationError

    from lockstep.config.names import nearest
    from lockstep.serve import SamplingParams

    own = {key: value for key, value in row.items() if key != "prompt"}
    unknown = set(own) - {field.name for field in fields(SamplingParams)}
    if unknown:
        near, alike = nearest(min(unknown), [field.name for field in fields(SamplingParams)])
        advice = f"did you mean {near!r}?" if alike else "remove it"
        raise LockstepError(f"{where} has the key {min(unknown)!r}, which is no sampling parameter: {advice}")
    if isinstance(own.get("stop"), str):
        own["stop"] = [own["stop"]]
    try:
        return TypeAdapter(SamplingParams).validate_json(json.dumps({**defaults, **own}), strict=True)
    except LockstepError as error:
        raise LockstepError(f"{where}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Input ")
        raise LockstepError(f"{where}: {first['loc'][0]} is {first['input']!r:.60}, {reason}") from error


def _write(file: Path | None, completions: list[Completion], mode: Literal["w", "a"] = "w") -> None:
    from dataclasses import asdict

    lines = "".join(json.dumps(asdict(completion), ensure_ascii=False) + "\n" for completion in completions)
    if file is None:
        sys.stdout.write(lines)
        return
    try:
        with file.open(mode, encoding="utf-8") as opened:
            opened.write(lines)
    except OSError as error:
        raise LockstepError(f"cannot write {file}: {error.strerror or error}") from error
