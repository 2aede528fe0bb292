"""Sections of a Markdown document that commands write: replaced whole, in place, and nothing else is touched."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lockstep.errors import LockstepError

_HEAD = """# Performance

Every section below is written by the command that stands in it (`--write docs/performance.md`), never by hand. Sides
of a comparison take turns within one run, so that a busy moment of the machine hits all of them; numbers are medians.
"""


def write_section(document: Path, name: str, text: str) -> None:
    """Put text into the section `name` of a document: in place of its old text, or at the end when it is new.

    A section lies between the lines `<!-- section: NAME -->` and `<!-- end: NAME -->`. A document that is not there
    is begun. LockstepError when the section's marks are broken. A reader never sees half a document.
    """
    old = document.read_text(encoding="utf-8") if document.exists() else _HEAD
    begin, end = f"<!-- section: {name} -->", f"<!-- end: {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if old.count(begin) != old.count(end) or old.count(begin) > 1:
        raise LockstepError(
            f"{document}: the section {name!r} needs one line `{begin}` and, below it, one line `{end}`; it has "
            f"{old.count(begin)} and {old.count(end)}. Remove its marks and its text, and it is written anew."
        )
    if begin in old:
        before, _, rest = old.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise LockstepError(f"{document}: the section {name!r} ends before it begins. Put `{begin}` first.")
        new = before + section + after
    else:
        new = old.rstrip("\n") + "\n\n" + section + "\n"
    _replace(document, new)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
