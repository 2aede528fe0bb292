"""The device classes that multiply bfloat16 by pairs and by tiles, on whatever processor the tests run on."""

from __future__ import annotations

import pytest

from tests.another_class.sitecustomize import BUILDS
from tests.ops.fingerprint import fingerprint_of
from tests.ops.other_classes import check
from tests.processes import answer


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUILDS)
def test_a_class_keeps_its_contract_wherever_it_runs(name: str) -> None:
    """Its instruction, its chains and its error, shared rows; and the plain build gives its bits. Every other test runs
    in it with `pytest --device-class`."""
    assert answer(check, name) == answer(fingerprint_of, BUILDS[name][2], "-O1")
