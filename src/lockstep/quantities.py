"""Numbers as a person reads them: four figures and the unit that fits."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes, in powers of 1000: ``4.2 MB``."""
    return _in_units(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def operations(count: float) -> str:
    """Floating-point operations: ``1.3 GFLOP``."""
    return _in_units(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def parameters(count: float) -> str:
    """Of a model: ``70.6 B``, ``27.8 M``."""
    return _in_units(count, ("", "k", "M", "B", "T")).rstrip()


def duration(seconds: float) -> str:
    """Seconds: ``4.13 s``, ``6 ms``, ``58 us``."""
    return (
        _in_units(seconds * 1e6, ("us", "ms", "s")) if seconds < 1 else f"{seconds:,.{2 if seconds < 1000 else 0}f} s"
    )


def counted(count: int, what: str) -> str:
    """``1 layer``, ``2 layers``, ``2 micro-batches``."""
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith(("ch", "sh", "x", "s")) else "s")


def entries(count: int) -> str:
    """``1 entry``, ``2 entries``."""
    return f"{count} {'entry' if count == 1 else 'entries'}"


def _in_units(count: float, units: tuple[str, ...]) -> str:
    """``units``: each 1000 times the one before."""
    power = 0
    while power + 1 < len(units) and float(f"{count / 1000**power:.4g}") >= 1000:
        power += 1
    return f"{count / 1000**power:.4g} {units[power]}"
