"""Every pass, one after the other, on random programs with views and writes: the bytes stay, memory stays apart."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from torch import Tensor

from lockstep.compile.passes import pipeline
from tests.compile.passes.graphs import capture, check, example_inputs, programs


@settings(max_examples=15)
@given(programs(writes=True))
def test_any_program_keeps_its_bytes(program: Callable[..., tuple[Tensor, ...]]) -> None:
    module = capture(program, *example_inputs())
    for step in pipeline("O2"):
        check(step, module, example_inputs())
