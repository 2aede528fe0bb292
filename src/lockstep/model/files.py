"""JSON files of model directories, and directories that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lockstep.errors import LockstepError

MARKER = "lockstep.json"
"""Says that a directory is an export: only such a one is replaced without force."""


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; LockstepError where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LockstepError(
            f"{file.parent} has no {file.name}, so it is no Hugging Face model directory; "
            "give one that `transformers` or `lockstep export` wrote, or a .gguf file"
        ) from None
    except OSError as error:
        raise LockstepError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LockstepError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise LockstepError(f"{file} must hold a JSON object, found {type(content).__name__}")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def new_directory(path: str | Path, kind: str, force: bool = False) -> Iterator[Path]:
    """A directory to write into, which takes its name only when the block ends without an error.

    Until then it is a sibling with a temporary name; on an error it is removed and the target is untouched.
    LockstepError where the target is no earlier export (unless forced), or the disk refuses.
    """
    target = Path(path).expanduser()
    _check_target(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise _refused(target, error) from error
    try:
        temporary.chmod(0o755)
        yield temporary
        write_json(temporary / MARKER, {"kind": kind, "format": 1})
        _rename(temporary, target)
    except (OSError, SafetensorError) as error:
        raise _refused(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_target(target: Path, force: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise LockstepError(f"{target} is a file or link, not a directory; choose another path")
    if force or not target.exists() or not any(target.iterdir()) or (target / MARKER).is_file():
        return
    raise LockstepError(
        f"{target} is not empty and no earlier export (it has no {MARKER}); choose another path, "
        "or replace all that is in it with --force"
    )


def _rename(temporary: Path, target: Path) -> None:
    """Directories cannot be exchanged in one step, so an old target steps aside first and comes back on failure."""
    if not target.exists():
        temporary.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(aside / target.name)
    try:
        temporary.rename(target)
    except OSError:
        (aside / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _refused(target: Path, error: Exception) -> LockstepError:
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    remedy = "the disk is full: free some space or choose another disk" if full else "check the path and its rights"
    return LockstepError(f"cannot write {target}: {error}; {remedy}. Nothing was changed")
