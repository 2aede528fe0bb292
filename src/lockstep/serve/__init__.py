"""Serving: requests in, tokens out. The engine, its parts from the inside out, and the server around it.

pool, radix, sequence, cache: which KV page belongs to whom (plain integers). scheduler: what is computed next,
as a value. drafting, draft_model: guesses of what comes. runner: the forward pass. structured, sampler, drawing,
text, scoring, stream: from logits to output. engine: all of it. embedding: vectors of texts. worker: the engine's
thread. api/: the OpenAI-compatible server.
"""

from lockstep.serve.embedding import embed
from lockstep.serve.engine import Engine, PromptTooLong, QueueFull, Stats
from lockstep.serve.params import Completion, Output, SamplingParams, TokenScore
from lockstep.serve.structured import StructuredOutputs

__all__ = [
    "Completion", "Engine", "Output", "PromptTooLong", "QueueFull", "SamplingParams", "Stats", "StructuredOutputs",
    "TokenScore", "embed",
]  # fmt: skip
