"""What a caller gave, checked where it comes in: a wrong type would surface far away, and NaN pass every test."""

from __future__ import annotations

from math import inf
from numbers import Integral, Real
from typing import Any

from lockstep.errors import LockstepError

_HUGE = 1e300
"""Beyond it products overflow; a whole number may even be too large for a float."""


def whole(
    value: Any, what: str, least: int = 1, most: int | None = None, error: type[Exception] = LockstepError
) -> int:
    """A whole number (no bool) from ``least`` to ``most``. what: how the message names it. Raises ``error``."""
    fits = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
    if not fits or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise error(f"{what} is {value!r:.60}; give a whole number {span}.")
    return int(value)


def number(
    value: Any,
    what: str,
    least: float = 0.0,
    most: float = inf,
    above: bool = False,
    error: type[Exception] = LockstepError,
) -> float:
    """A finite number from ``least`` (``above``: more than it) to ``most``. Raises ``error``."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    fits = real and -_HUGE < value < _HUGE and least <= value <= most
    if not fits or (above and value == least):
        span = f"above {least:g}" if above else f"of at least {least:g}"
        span += f" and at most {most:g}" if most < inf else ""
        raise error(f"{what} is {value!r:.60}; give a finite number {span}.")
    return float(value)


def instance(value: Any, kind: type[Any], what: str, error: type[Exception] = LockstepError) -> Any:
    """A value of a class. Raises ``error`` that names the class."""
    if not isinstance(value, kind):
        raise error(f"{what} is {value!r:.60}; give a {kind.__name__}.")
    return value
