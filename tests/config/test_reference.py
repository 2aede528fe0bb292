"""The reference names every key, describes it, and is the one in docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import Config
from lockstep.config.names import fields
from lockstep.config.reference import reference

DOCS = Path(__file__).parents[2] / "docs"


def test_the_written_reference_is_up_to_date():
    written = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert written == reference(), "run: lockstep config reference > docs/configuration.md"


@pytest.mark.parametrize("name", [name for name, _ in fields(Config)])
def test_every_key_stands_in_the_reference_with_a_description(name):
    (line,) = [line for line in reference().splitlines() if line.startswith(f"| `{name}` |")]
    assert not line.endswith("|  |"), f"{name} has no description"
