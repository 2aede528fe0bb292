"""The largest number of a row against NumPy's, wherever it stands and whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.ops.called import largest

NUMBERS = [0.0, -0.0, 1.0, -3.0, 2.5, np.inf, -np.inf, np.nan, 3.4028235e38]
rows = st.integers(1, 700).flatmap(
    lambda width: st.lists(st.tuples(st.integers(0, width - 1), st.sampled_from(NUMBERS)), max_size=6).map(
        lambda some: (width, some)
    )
)


@given(rows, st.sampled_from([-1.0, -np.inf, 0.0]))
def test_any_row(row: tuple[int, list[tuple[int, float]]], rest: float) -> None:
    width, some = row
    x = np.full((2, width), rest, dtype=np.float32)
    for place, number in some:
        x[1, place] = number
    expected = [int(one.argmax()) if np.isfinite(one.max()) else -1 for one in x]
    assert largest(torch.from_numpy(x)) == expected


def test_rows_that_do_not_lie_side_by_side() -> None:
    x = torch.randn(40, 7, generator=torch.Generator().manual_seed(0)).t()
    assert largest(x) == x.argmax(-1).tolist()
    assert largest(x[:0]) == []


def test_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected float32 \[rows, width\], got torch.float64 \[2, 3\]"):
        largest(torch.zeros(2, 3, dtype=torch.float64))
