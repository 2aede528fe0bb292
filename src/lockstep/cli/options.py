"""Options that several commands share, each declared once."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from lockstep.errors import LockstepError

ModelArgument = Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias (smollm2-135m).")]
Dtype = Annotated[Literal["bfloat16", "float32"], typer.Option(help="Compute dtype.")]
Numerics = Annotated[Literal["bitwise", "fast"], typer.Option(help="Contract kernels or plain PyTorch.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]
Seed = Annotated[int | None, typer.Option(help="Fix the draws.")]


def whole_numbers(option: str, text: str, such_as: str, most: int | None = None) -> tuple[int, ...]:
    """The value of an option that takes whole numbers from 1 (to `most`), comma-separated. LockstepError for others."""
    parts = text.split(",")
    if all(part.strip().isdecimal() and 1 <= int(part) <= (most or int(part)) for part in parts):
        return tuple(int(part) for part in parts)
    span = "from 1" if most is None else f"from 1 to {most} (the model's)"
    raise LockstepError(f"{option} is {text!r}: give whole numbers {span}, such as {such_as}.")
