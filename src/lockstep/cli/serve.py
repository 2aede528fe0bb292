"""`lockstep serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lockstep.cli.options import Dtype, Numerics
from lockstep.errors import LockstepError
from lockstep.serve.launch import Launched, launch, share_of_cores
from lockstep.serve.port import bind

if TYPE_CHECKING:
    from lockstep.config import ServeConfig

LogLevel = Annotated[
    Literal["warning", "info", "debug"],
    typer.Option(help="info: a line per request; debug: the engine also checks its pages after every step."),
]


def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A directory, a .gguf file or an alias (smollm2-135m).")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A YAML file; its `serve` section.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, such as serve.max_running=8.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.  [default: 8000]")] = None,
    model_name: Annotated[str | None, typer.Option(help="The name clients ask for.  [default: MODEL]")] = None,
    api_key: Annotated[str | None, typer.Option(help="Ask clients for this key.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A small model that guesses ahead; same output.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for keys and values.  [default: 1GiB]")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines side by side, each a process.  [default: 1]")] = None,
    tp: Annotated[int | None, typer.Option(help="Processes that share the model.  [default: 1]")] = None,
    dtype: Dtype = "bfloat16",
    numerics: Numerics = "bitwise",
    log_level: LogLevel = "info",
) -> None:
    """Serve a model over HTTP with OpenAI's interface."""
    given = {
        "host": host, "port": port, "model_name": model_name, "api_key": api_key, "kv_memory": kv_memory,
        "draft_model": draft_model, "replicas": replicas, "tp": tp,
    }  # fmt: skip
    settings = [*(set_ or []), *(f"serve.{key}={value}" for key, value in given.items() if value is not None)]
    from lockstep.config import load_config

    whole = load_config(config, settings)
    source = model if model is not None else whole.model
    if not isinstance(source, str):
        raise LockstepError(
            "no model to serve: give a directory, a .gguf file or an alias, as in `lockstep serve DIR`."
        )
    _run(source, whole.serve, context.obj, dtype, numerics, log_level)


def _run(
    source: str, config: ServeConfig, engine: Launched | None, dtype: Dtype, numerics: Numerics, log_level: LogLevel
) -> None:
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    from lockstep.serve.check import check_spec, check_tracing
    from lockstep.serve.spec import engine_spec

    # What takes a moment first: what is wrong is told before a model is loaded, which may take minutes.
    with bind(config.host, config.port) as bound:
        spec = engine_spec(source, config, dtype, numerics, log_level)
        check_spec(spec, config.replicas)
        if config.otel:
            check_tracing()
        if engine is None and config.replicas == 1:
            engine = launch(share_of_cores(config.tp), config.tp)
        from lockstep.serve.api import serve as run_server
        from lockstep.serve.replicas import Replicas

        engines = Replicas(spec, config.replicas, engine, config.hang_seconds)
        run_server(engines, config.model_name or source, config, bound)
