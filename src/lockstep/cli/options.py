"""Options that several commands share, each declared once."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ModelArgument = Annotated[str, typer.Argument(help="A directory, a .gguf file or an alias (smollm2-135m).")]
Dtype = Annotated[Literal["bfloat16", "float32"], typer.Option(help="Compute dtype.")]
Numerics = Annotated[Literal["bitwise", "fast"], typer.Option(help="Contract kernels or plain PyTorch.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]
Seed = Annotated[int | None, typer.Option(help="Fix the draws.")]
