"""What a calibration gained: every measured step beside what is predicted of it, as described and as fitted."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lockstep.plan.calibrate import Measured
from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.predict import timed
from lockstep.quantities import duration

_FAR = 0.3
"""A step that is still so far off is not what was measured, or not of this cluster."""


def fit_text(rows: Sequence[Measured], cluster: Cluster, fitted: Coefficients) -> str:
    """A line for each measured step, and the mean errors. cluster: whose description ``fitted`` corrects."""
    errors: list[tuple[float, float]] = []
    lines = [f"{'measured':>10s}  {'as described':>20s}  {'fitted':>20s}"]
    for row in rows:
        both = (Coefficients(), fitted)
        times = [timed(row.model, row.layout, cluster, row.batch, factors, "bf16").step_s for factors in both]
        before, after = (time / row.step_s - 1 for time in times)
        errors.append((abs(before), abs(after)))
        said = [f"{duration(time)} ({100 * error:+.1f} %)" for time, error in zip(times, (before, after), strict=True)]
        words = f"{row.model.name} {row.layout.describe()}"
        lines.append(f"{duration(row.step_s):>10s}  {said[0]:>20s}  {said[1]:>20s}  {words}")
    far = [str(i) for i, (_, error) in enumerate(errors) if error > _FAR]
    before, after = (100 * fmean(each) for each in zip(*errors, strict=True))
    lines.append(f"mean error {before:.1f} % as described, {after:.1f} % fitted: of the steps that it was fitted to")
    if far:
        lines.append(
            f"row{'s' * (len(far) > 1)} {', '.join(far)} (from 0): more than {100 * _FAR:.0f} % off after the fit too. "
            "Are step_s (seconds), sequences (of the whole step), seq, layout and --cluster those of that run?"
        )
    return "\n".join(lines)
