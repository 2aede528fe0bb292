"""The passes over a captured graph: each a small file, each keeps every bit, together a pipeline per level."""

from lockstep.compile.passes.base import Changes, Pass, PassContext, PassReport, apply
from lockstep.compile.passes.pipeline import Level, pass_names, pipeline

__all__ = ["Changes", "Level", "Pass", "PassContext", "PassReport", "apply", "pass_names", "pipeline"]
