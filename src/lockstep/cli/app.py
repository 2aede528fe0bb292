"""`lockstep COMMAND`: finds the command's file, imports only that one, and turns errors into short lessons.

Exit codes: 0 done; 2 a mistake in what the user gave (`LockstepError`, wrong usage); 1 a bug; 130 interrupted.
"""

from __future__ import annotations

import ast
import errno
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.serve.launch import Launched

COMMANDS = (
    "train", "eval", "export", "convert", "quantize", "hash", "plan", "dryrun",
    "serve", "chat", "generate", "bench", "cache", "config", "doctor",
)  # fmt: skip
"""Command names in the order of the help page; one is there when the file `cli/NAME.py` is. Where it is a folder, each
file in it is a sub-command."""

_RIGHTS = "check its rights, or choose another path"
_SPACE = "free some space, or choose another disk"
_SYSTEM = {
    errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS, errno.EROFS: _RIGHTS, errno.ENOSPC: _SPACE, errno.EDQUOT: _SPACE,
    errno.ENAMETOOLONG: "choose a shorter name", errno.ELOOP: "its links lead round in a circle; choose another path",
    errno.ENOMEM: "ask for less of this machine's memory, such as a smaller model, batch or kv_memory",
}  # fmt: skip
"""What the system refuses is no bug, wherever it is met."""

_EPILOG = "Every command takes --debug: show the traceback of an error."


def main(arguments: Sequence[str] | None = None, engine: Launched | None = None) -> None:
    """Run the command line and exit the process with its code. engine: see `run`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug, rest = _take_debug(given)
    sys.exit(run(rest or ["--help"], debug, engine))


def run(arguments: list[str], debug: bool = False, engine: Launched | None = None) -> int:
    """Run one command and return the exit code; messages of errors go to stderr. engine: of `lockstep serve`, where it
    was started before there was time for this."""
    try:
        command = typer.main.get_command(_application(arguments))
        # Not standalone: errors come here, so that every one of them is reported in the same way.
        result = command.main(arguments, prog_name="lockstep", standalone_mode=False, obj=engine)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        code, message = _explain(error)
        if debug:
            traceback.print_exc()
        print(message, file=sys.stderr)
        return code


def _explain(error: Exception) -> tuple[int, str]:
    """The exit code and the message of an error that ended a command."""
    if isinstance(error, LockstepError):
        return 2, f"lockstep: {error}"
    if hasattr(error, "format_message"):  # what typer raises for wrong usage; its class moved between versions
        context = getattr(error, "ctx", None)
        page = f"{context.command_path} --help" if context else "lockstep --help"
        return 2, f"lockstep: {_not_converted(error) or error.format_message()} ({page} lists what there is)"
    if isinstance(error, OSError) and error.errno in _SYSTEM:
        place = f"{error.filename}: " if error.filename else ""
        return 2, f"lockstep: {place}{error.strerror}: {_SYSTEM[error.errno]}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # PyTorch raises RuntimeError
        return 2, f"lockstep: this machine's memory is too small ({error}): make the model or the batch smaller"
    return 1, f"lockstep: this is a bug: {type(error).__name__}: {error} (--debug shows the traceback)"


def _not_converted(error: Exception) -> str:
    """Of an option's value that is none of its type: the option and the value, which typer's own message lacks."""
    errors, parameter = getattr(error.__context__, "errors", None), getattr(error, "param", None)
    if errors is None or parameter is None:  # errors: of pydantic, which typer converts with
        return ""
    wrong = errors()[0]
    expected = wrong["msg"].removeprefix("Input ").partition(",")[0]
    return f"{' / '.join(parameter.opts)} {str(wrong['input'])!r}: it {expected}"


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Whether --debug stands anywhere before a bare `--`, and the arguments without it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(options) < end, options + arguments[end:]


def _application(arguments: list[str]) -> typer.Typer:
    """All commands for the help page; only the one that the arguments name is imported."""
    app = _group("Train and serve large language models with the same bits on every path.")
    app.callback()(_options)
    words = [argument for argument in arguments if not argument.startswith("-")]
    _add_commands(app, "", [name for name in COMMANDS if _file(name).exists()], words)
    return app


def _group(help_line: str) -> typer.Typer:
    return typer.Typer(
        help=help_line,
        epilog=_EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def _add_commands(app: typer.Typer, prefix: str, names: Sequence[str], words: Sequence[str]) -> None:
    """Commands of this prefix ("" or "bench."); only the one that the first of the words names is imported."""
    for name in names:
        chosen = name == next(iter(words), None)
        file = _file(prefix + name)
        if file.name == "__init__.py":
            group = _group(_help_line(ast.parse(file.read_text(encoding="utf-8"))))
            inner = sorted(path.stem for path in file.parent.glob("[!_]*.py"))
            _add_commands(group, f"{prefix}{name}.", inner, words[1:] if chosen else [])
            app.add_typer(group, name=name)
        else:
            app.command(name, epilog=_EPILOG)(_function(prefix + name) if chosen else _listed(name, file))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {metadata.version('lockstep')}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options that stand before the command. Here for the help page: `main` takes --debug wherever it stands."""


def _file(name: str) -> Path:
    """The file of a command, or of the folder of its sub-commands; "bench.ops" names a sub-command."""
    path = Path(__file__).parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _function(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"lockstep.cli.{name}")
    function: Callable[..., Any] = getattr(module, name.rpartition(".")[2])
    return function


def _listed(name: str, file: Path) -> Callable[[], None]:
    """A stand-in that carries the command's help line, read from the source without importing it."""

    def stand_in() -> None:
        raise AssertionError(f"{name} was not imported")

    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            stand_in.__doc__ = _help_line(node)
    return stand_in


def _help_line(node: ast.Module | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]
