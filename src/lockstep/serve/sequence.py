"""One choice of one request on its way through the engine: its tokens, its pages, its progress."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from lockstep.ops import PAGE
from lockstep.serve.params import SamplingParams
from lockstep.serve.pooling import Pool
from lockstep.serve.radix import Key, Node

GRAM = 3
"""Tokens that must have come before in the same order for a guess."""


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
    client: str = ""
    """Whose it is; "" for all that do not say."""
    pool: Pool | None = None
    """Of an embedding: where its hidden states go."""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    node: Node | None = None
    cached_tokens: int | None = None
    given: int = 0
    """Tokens that its client was charged for, or had for nothing."""
    scored: int = 0
    """Prompt tokens whose log-probabilities are known (when asked for)."""
    _keys: list[Key] = field(default_factory=list)
    _seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Where each run of GRAM tokens ended last, as far as `_indexed`."""
    _indexed: int = GRAM

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
        """Log-probabilities of prompt tokens are still wanted."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_length - 1

    @property
    def reads_prompt(self) -> bool:
        """The rows of its prompt must be computed, not found: something is read from each."""
        return self.scores_prompt or (self.pool is not None and self.pool.reads_all)

    def keys(self, count: int) -> list[Key]:
        """The keys of its first `count` pages, all full."""
        for page in range(len(self._keys), count):
            self._keys.append(tuple(self.tokens[page * PAGE : (page + 1) * PAGE]))
        return self._keys[:count]

    def guess(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next: those that followed the last GRAM tokens the time before.

        Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
        """
        tokens = self.tokens
        for end in range(self._indexed, len(tokens)):
            self._seen[tuple(tokens[end - GRAM : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        at = self._seen.get(tuple(tokens[-GRAM:]))
        return [] if at is None else tokens[at : at + count]
