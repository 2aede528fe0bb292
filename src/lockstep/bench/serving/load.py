"""One load on one server: some prompts at once, each streamed, every token's moment kept."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.errors import LockstepError

_PATIENCE = 600.0
"""Seconds without a token after which a server counts as stuck."""


@dataclass(frozen=True)
class Load:
    """What the clients saw. first: seconds to the first token, one per request; gaps: between tokens, all of them."""

    first: tuple[float, ...]
    gaps: tuple[float, ...]
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Output tokens per second over the whole load, prompts included."""
        return self.tokens / self.seconds

    @property
    def median_first(self) -> float:
        return statistics.median(self.first)

    def gap(self, quantile: float) -> float:
        """Seconds between two tokens at this quantile, 0 to 1."""
        ordered = sorted(self.gaps) or [0.0]
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def ask(url: str, body: dict[str, Any], prompts: Sequence[Sequence[int]], tokens: int) -> Load:
    """Send all prompts (token ids) to url/v1/completions at once and read each stream to its end.

    body: the model's name and what else the server needs. LockstepError when a stream fails or has another length.
    """
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return asyncio.run(_ask(url, {**body, **stream, "max_tokens": tokens, "temperature": 0.0}, prompts, tokens))


async def _ask(url: str, body: dict[str, Any], prompts: Sequence[Sequence[int]], tokens: int) -> Load:
    import httpx

    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE, limits=limits) as client:
        began = time.perf_counter()
        streams = await asyncio.gather(*(_stream(client, {**body, "prompt": list(p)}) for p in prompts))
        seconds = time.perf_counter() - began
    for stream in streams:
        if stream.tokens != tokens:
            raise LockstepError(f"{url} answered a request for {tokens} tokens with {stream.tokens}")
    first = tuple(stream.moments[0] - began for stream in streams)
    gaps = tuple(b - a for stream in streams for a, b in pairwise(stream.moments))
    return Load(first, gaps, tokens * len(prompts), seconds)


@dataclass(frozen=True)
class _Stream:
    """The moments at which text came, and the tokens by the server's own count."""

    moments: list[float]
    tokens: int


async def _stream(client: Any, body: dict[str, Any]) -> _Stream:
    moments: list[float] = []
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise LockstepError(f"{client.base_url} refused a completion with {response.status_code}: {text:.300}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise LockstepError(f"{client.base_url} broke a stream: {event['error']}")
                if event.get("choices"):
                    moments.append(time.perf_counter())
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    return _Stream(moments, tokens)
