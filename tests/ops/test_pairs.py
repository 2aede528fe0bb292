"""The device class that multiplies bfloat16 by pairs, on whatever processor the tests run on."""

from __future__ import annotations

import pytest

from tests.ops.fingerprint import fingerprint_of
from tests.ops.pairs import check
from tests.processes import answer


@pytest.mark.timeout(600)
def test_the_class_keeps_its_contract_wherever_it_runs() -> None:
    """Its instruction, its chains and its error, shared rows; and the plain build gives its bits. Every other test runs
    in it with `pytest --pairs`."""
    assert answer(check) == answer(fingerprint_of, "plain-pairs", "-O1")
