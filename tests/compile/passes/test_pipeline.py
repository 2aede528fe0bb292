"""Which passes run, and the errors for names that are none."""

from __future__ import annotations

import pytest

from lockstep.compile.passes import PassContext, apply, pass_names, pipeline
from lockstep.errors import LockstepError
from tests.compile.passes.graphs import capture, example_inputs


def names(*args: object, **kwargs: object) -> list[str]:
    return [step.name for step in pipeline(*args, **kwargs)]  # type: ignore[arg-type]


def test_levels() -> None:
    assert names("O0") == []
    assert names("O2") == list(pass_names())
    assert set(names("O1")) <= set(names("O2"))


def test_leave_out_and_keep_only() -> None:
    assert "dead-code" not in names("O2", disable=["dead-code"])
    assert names("O2", only=["dead-code"]) == ["dead-code"]


def test_a_wrong_name_is_told_with_the_nearest() -> None:
    with pytest.raises(LockstepError, match=r"compile.disable_pass: there is no pass 'dead_code'.*mean 'dead-code'"):
        pipeline("O1", disable=["dead_code"])
    with pytest.raises(LockstepError, match=r"compile.only_pass: .*The passes are: .*dead-code"):
        pipeline("O1", only=["zzz"])
    with pytest.raises(LockstepError, match="exclude each other"):
        pipeline("O1", ["dead-code"], ["dead-code"])


def test_the_report_counts_nodes() -> None:
    module = capture(lambda a, b: (a.exp(), a.exp() + b)[1], *example_inputs())
    merged, dropped = apply(module, pipeline("O2", only=["common-subexpressions", "dead-code"]), PassContext())
    assert (merged.before, merged.after, merged.changed) == (3, 2, 1)
    assert (dropped.before, dropped.after, dropped.changed) == (2, 2, 0)
    assert merged.seconds > 0
