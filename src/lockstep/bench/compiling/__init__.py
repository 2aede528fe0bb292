"""Compile times and step times of the levels, beside `torch.compile` on the same shape of `transformers`."""

from lockstep.bench.compiling.measure import compile_report

__all__ = ["compile_report"]
