"""The budget for keys and values."""

from __future__ import annotations

import pytest

from lockstep.errors import LockstepError
from lockstep.serve import Engine
from lockstep.serve.capacity import machine_memory, page_count


def test_pages_of_a_budget():
    assert page_count(1000, 100) == 10
    with pytest.raises(LockstepError, match="one page of 64 tokens takes 100 bytes"):
        page_count(99, 100)


def test_more_than_the_machine_has_is_refused_with_what_fits(model):
    there = machine_memory()
    assert there is not None
    with pytest.raises(LockstepError, match=r"this machine has .*give less, such as [\d.]+[GM]iB \(\d+ tokens"):
        Engine(model, kv_memory=there + 1)


def test_a_container_s_limit_counts(tmp_path):
    file = tmp_path / "memory.max"
    file.write_text("1048576\n")
    assert machine_memory(file) == 2**20
    file.write_text("max\n")
    assert machine_memory(file) == machine_memory(tmp_path / "none") > 2**20
