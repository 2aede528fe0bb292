"""One choice of one request on its way through the engine: its tokens, its pages, its progress."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from lockstep.ops import PAGE
from lockstep.serve.params import SamplingParams
from lockstep.serve.radix import Key, Node


@dataclass(eq=False)
class Sequence:
    """Mutable: the scheduler and the cache move it along.

    `tokens` is the prompt and what was generated; the keys and values of the first `computed` of them lie in
    `pages`. The first `shared` pages belong to the radix cache, under the locked `node`; the rest is its own.
    """

    uid: int
    request: int
    choice: int
    params: SamplingParams
    seed: int
    prompt_length: int
    tokens: list[int]
    limit: int
    """Tokens it may grow to, prompt included."""
    priority: int = 0
    deadline: float | None = None
    """Monotonic seconds."""
    salt: Hashable = None
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    node: Node | None = None
    cached_tokens: int | None = None
    scored: int = 0
    """Prompt tokens whose log-probabilities are known (when asked for)."""
    _keys: list[Key] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Only the newest token is to be computed."""
        return self.remaining == 1 and len(self.tokens) > self.prompt_length

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of prompt tokens are still wanted: their rows must be computed, not found."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_length - 1

    def keys(self, count: int) -> list[Key]:
        """The keys of its first `count` pages, all full."""
        for page in range(len(self._keys), count):
            self._keys.append(tuple(self.tokens[page * PAGE : (page + 1) * PAGE]))
        return self._keys[:count]
