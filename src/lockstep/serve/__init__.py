"""Serving: requests in, tokens out. The engine, its parts from the inside out, and the server around it.

pool, radix, sequence, cache: which KV page belongs to whom (plain integers). scheduler: what is computed next,
as a value. drafting, draft_model: guesses of what comes. inputs, runner: the forward pass. structured, sampler,
drawing, text, scoring, stream: from logits to output. engine: all of it; offline: batches without a server. embedding:
vectors of texts. spec, wire, child, launch, supervisor: the engine in a process of its own, trial: its compiler of long
structures in another; router, replicas: several. api/: the OpenAI-compatible server, with a web page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import importer

if TYPE_CHECKING:
    from lockstep.serve.embedding import embed as embed
    from lockstep.serve.engine import Engine as Engine
    from lockstep.serve.params import Completion as Completion
    from lockstep.serve.params import Output as Output
    from lockstep.serve.params import SamplingParams as SamplingParams
    from lockstep.serve.params import TokenScore as TokenScore
    from lockstep.serve.state import PromptTooLong as PromptTooLong
    from lockstep.serve.state import QueueFull as QueueFull
    from lockstep.serve.state import Stats as Stats
    from lockstep.serve.structured import StructuredOutputs as StructuredOutputs

_FILES = {
    "Completion": "params", "Engine": "engine", "Output": "params", "PromptTooLong": "state", "QueueFull": "state",
    "SamplingParams": "params", "Stats": "state", "StructuredOutputs": "structured", "TokenScore": "params",
    "embed": "embedding",
}  # fmt: skip
"""Where each public name lives. It is imported when asked for: the server's own process has no use for torch."""

__all__ = [
    "Completion", "Engine", "Output", "PromptTooLong", "QueueFull", "SamplingParams", "Stats", "StructuredOutputs",
    "TokenScore", "embed",
]  # fmt: skip

__getattr__ = importer(__name__, _FILES)
