"""How many KV pages a memory budget gives, told before anything is allocated: Linux kills what does not fit."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.config.pages import PAGE
from lockstep.errors import LockstepError


def page_count(kv_memory: int, page: int, engines: int = 1) -> int:
    """Pages of so many bytes that fit in kv_memory bytes; LockstepError for none, or for more than the machine has.
    engines: how many have as much each."""
    if kv_memory < page:
        raise LockstepError(
            f"kv_memory is {kv_memory} bytes, but one page of {PAGE} tokens takes {page} bytes "
            "on this model: give at least a few pages."
        )
    there = machine_memory()
    if there is not None and kv_memory * engines > there:
        each, less = "" if engines == 1 else f" for each of {engines} replicas", there // 2 // engines
        raise LockstepError(
            f"kv_memory is {_size(kv_memory)}{each}, but this machine has {_size(there)} of memory, for the weights as "
            f"well: give less, such as {_size(less)} ({less // page * PAGE} tokens of this model)."
        )
    return kv_memory // page


def machine_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Bytes of physical memory, or of this container's limit if that is less; None where the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        text = limit.read_text().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def _size(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:.4g}{name}"
