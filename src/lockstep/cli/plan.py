"""`lockstep plan`: the best parallel strategies for a model on a cluster, before any of it is rented."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from rich.status import Status

    from lockstep.plan import Coefficients

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def plan(
    model: Annotated[str, typer.Argument(help="A model's name, config.json, directory or YAML; or `calibrate`.")],
    measured: Annotated[Path | None, typer.Argument(help="With `calibrate`: a YAML or JSON list of steps.")] = None,
    cluster: Annotated[str, typer.Option(help="Devices, such as 64xH100, or 64xmine.yaml.")] = "8xH100",
    seq: Annotated[
        int | None, typer.Option(help="Tokens per sequence.  [default: what a run's YAML says, or 8192]")
    ] = None,
    global_batch_tokens: Annotated[
        str | None,
        typer.Option(help="Tokens per optimizer step: 4M = 4 x 2^20.  [default: what a run's YAML says, or 4M]"),
    ] = None,
    pin: Annotated[list[str] | None, typer.Option(help="KEY=VALUE that must not change, such as tp=8.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="How many plans to show.  [default: 5]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Compute dtype of matrix products.  [default: what a run's YAML says, or bf16]")
    ] = None,
    coefficients: Annotated[Path | None, typer.Option(help="A file from `lockstep plan calibrate`.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.  [default: plan.yaml or coefficients.yaml]")] = None,
    picture: Annotated[
        bool | None,
        typer.Option("--report/--no-report", help="Write a page and a trace beside it.  [default: report]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are no earlier plan's.")] = False,
) -> None:
    """Find the best parallel strategy for a model on a cluster.

    `lockstep plan calibrate STEPS` fits the planner to measured steps instead; of the options it takes --cluster,
    --out and --force.
    """
    if model == "calibrate":
        given = {
            "--seq": seq,
            "--global-batch-tokens": global_batch_tokens,
            "--pin": pin,
            "--coefficients": coefficients,
            "--top": top,
            "--dtype": dtype,
            "--report": picture,
        }
        if unused := [name for name, value in given.items() if value not in (None, [])]:
            raise LockstepError(f"plan calibrate takes --cluster, --out and --force; leave out {', '.join(unused)}.")
        return _calibrate(measured, cluster, out or Path("coefficients.yaml"), force)
    if measured is not None:
        raise LockstepError(
            f"plan {model} {measured}: one model at a time; only `plan calibrate` takes a file behind it."
        )
    from lockstep.plan import search_to_run
    from lockstep.plan.of_run import asked_of, batch_of, dtype_of
    from lockstep.plan.report import report

    picture = picture is not False
    started, files = time.perf_counter(), _files(out or Path("plan.yaml"), picture, force)
    again, stale = files["plan"].is_file(), [] if picture else _stale(files["plan"])
    pinned, factors = pins(pin or []), _coefficients(coefficients)
    shape, run = asked_of(model)
    asked, dtype = batch_of(run), dtype or dtype_of(run)
    with _status("searching") as status:
        found = search_to_run(
            shape,
            cluster,
            seq=asked.seq if seq is None else seq,
            global_batch_tokens=asked.tokens if global_batch_tokens is None else tokens(global_batch_tokens),
            pins=pinned,
            top=5 if top is None else top,
            coefficients=factors,
            dtype=dtype,
            run=run,
        )
        plans = found.plans
        plans[0].save(files["plan"])
        if picture:
            from lockstep.plan.report_page import save_report

            status.update("drawing")
            with _writing():
                save_report(plans, cluster, files["report"], files["trace"], pinned, factors, dtype)
        with _writing():
            for file in stale:
                file.unlink()
    took = f"wrote {', '.join(map(str, files.values()))} in {time.perf_counter() - started:.1f} s"
    took += f", in place of an earlier {files['plan'].name}" if again else ""
    took += f"; removed {', '.join(map(str, stale))}, which showed it" if stale else ""
    # Said last: whoever reads may close the pipe after a line.
    typer.echo("\n".join([report(plans, cluster), *([f"\nnote: {found.note}"] if found.note else []), "", took]))
    return None


def _files(path: Path, picture: bool, force: bool) -> dict[str, Path]:
    """What is written: the plan and, beside it, the page and the trace. Raises LockstepError where that cannot be."""
    from lockstep.plan.former import check_target

    if not path.name:
        raise LockstepError(f"--out {str(path)!r} names no file: give a name such as plan.yaml.")
    files = {"plan": path, **(_beside(path) if picture else {})}
    if path in _beside(path).values():
        raise LockstepError(f"--out {path} is where the report would go: give a name such as plan.yaml.")
    for kind, file in files.items():
        check_target(file, kind, force)
    return files


def _beside(path: Path) -> dict[str, Path]:
    return {"report": path.with_suffix(".html"), "trace": path.with_suffix(".trace.json")}


def _stale(path: Path) -> list[Path]:
    """The page and the trace of an earlier plan in this place."""
    from lockstep.plan.former import is_former

    return [file for kind, file in _beside(path).items() if is_former(file, kind)]


def tokens(text: str) -> int:
    """A number of tokens with K, M or G (powers of 1024) behind it."""
    number, unit = (text[:-1], text[-1].upper()) if text and text[-1].isalpha() else (text, "")
    try:
        found = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError) as error:
        raise LockstepError(f"--global-batch-tokens {text!r}: expected a number such as 4M or 4194304.") from error
    if found < 1:
        raise LockstepError(f"--global-batch-tokens {text!r}: a step has at least 1 token: give a number such as 4M.")
    return found


def pins(given: list[str]) -> dict[str, str]:
    """KEY=VALUE texts as a mapping."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise LockstepError(f"--pin {text!r}: expected KEY=VALUE, such as --pin tp=8.")
        if found.get(key.strip(), value.strip()) != value.strip():
            raise LockstepError(
                f"--pin {key.strip()} is given twice, as {found[key.strip()]} and as {value.strip()}: give it once."
            )
        found[key.strip()] = value.strip()
    return found


def _status(text: str) -> Status:
    """In a terminal, that something goes on."""
    from rich.console import Console

    return Console(stderr=True).status(text)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LockstepError(f"cannot write {error.filename}: {error.strerror}. Choose another --out.") from error


def _coefficients(path: Path | None) -> Coefficients | None:
    from lockstep.plan.coefficients import load_coefficients

    return load_coefficients(path) if path else None


def _calibrate(measured: Path | None, cluster: str, out: Path, force: bool) -> None:
    from lockstep.plan import calibrate, load_cluster
    from lockstep.plan.calibrate import load_measured
    from lockstep.plan.coefficients import FACTOR_ON, save_coefficients
    from lockstep.plan.fit_report import fit_text
    from lockstep.plan.former import check_target
    from lockstep.quantities import counted

    if measured is None:
        raise LockstepError("plan calibrate needs a file of measured steps: lockstep plan calibrate steps.yaml.")
    check_target(out, "coefficients", force)
    rows, place = load_measured(measured), load_cluster(cluster)
    with _status("fitting"):
        found = calibrate(rows, place)
        gained = fit_text(rows, place, found)
    with _writing():
        save_coefficients(found, out)
    typer.echo(f"fitted {counted(len(rows), 'measured step')} on {cluster}; wrote {out}\n{gained}\n")
    typer.echo("factors, 1 being as described:")
    for name, value in found.factors().items():
        typer.echo(f"  {name:20s} {value:.3f}  on {FACTOR_ON[name]}")
    if found.layer:
        typer.echo(f"and on the time of a layer, for each of the layer shapes that were measured: {len(found.layer)}")
