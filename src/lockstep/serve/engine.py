"""The engine: requests in, tokens out, step by step. One thread calls it; it never waits for anything."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from lockstep.config.pages import PAGE
from lockstep.config.serve import BATCH_TOKENS
from lockstep.errors import LockstepError
from lockstep.given import whole
from lockstep.model import Model
from lockstep.serve import offline
from lockstep.serve.cache import Cache
from lockstep.serve.capacity import page_count
from lockstep.serve.draft_model import DraftModel, check_draft
from lockstep.serve.drawing import DAMAGED, Draw, draw_all
from lockstep.serve.pace import Pace
from lockstep.serve.params import (
    Completion,
    Embedding,
    FinishReason,
    Output,
    Pooling,
    SamplingParams,
    TokenScore,
)
from lockstep.serve.pooling import Pool, Vector
from lockstep.serve.runner import Level, Runner, page_bytes, pages_dtype
from lockstep.serve.sampler import draw_seed
from lockstep.serve.scheduler import Scheduler
from lockstep.serve.scoring import Reading, drawn_scores, readings, scores
from lockstep.serve.sequence import Sequence
from lockstep.serve.state import PromptTooLong, QueueFull, Stats
from lockstep.serve.stream import OutputStream
from lockstep.serve.structured import Guide, Guides
from lockstep.serve.text import Decode
from lockstep.serve.weights import replace_weights

if TYPE_CHECKING:
    from lockstep.serve.tp.group import Group


class Engine:
    """Serves a model: continuous batching, chunked prefill, a radix cache over KV pages.

    model: what `lockstep.load` gives, or the processes that share one (`serve.tp`). tp: processes that share the
    model's layers, with its bytes; `close` ends them.
    kv_memory: bytes for keys and values, of all processes together. max_batch_tokens: tokens of one step. step_seconds:
    how long a step may take while a sequence waits for its next token: prompts are then read in smaller chunks.
    max_running: sequences that share a step. max_queue: sequences that may wait (None: any number).
    shares: how much more than others a client gets while requests wait, 1 for whom it does not name.
    kv_dtype: "int8" halves what a page takes, on a model loaded with numerics "fast"; "auto" is the model's dtype.
    drafts: tokens that are guessed and verified in one pass; the output is the same without. They are guessed by
    draft_model, a small model of the same vocabulary, or by prompt lookup. None: 4 with a draft model, else 0.
    level: O2 runs a step as one compiled program, O0 operator by operator; the bits are the same.
    debug: check the page invariant after every step.
    """

    def __init__(
        self,
        model: Model | Group,
        *,
        tp: int = 1,
        kv_memory: int = 2**30,
        kv_dtype: Literal["auto", "int8"] = "auto",
        max_batch_tokens: int = BATCH_TOKENS,
        step_seconds: float | None = None,
        max_running: int = 64,
        max_queue: int | None = None,
        shares: Mapping[str, float] | None = None,
        prefix_cache: bool = True,
        drafts: int | None = None,
        draft_model: Model | None = None,
        level: Level = "O2",
        debug: bool = False,
    ) -> None:
        for name, value, least in (
            ("max_batch_tokens", max_batch_tokens, 1), ("max_running", max_running, 1), ("tp", tp, 1),
            ("kv_memory, in bytes,", kv_memory, 1), ("max_queue", max_queue or 0, 0), ("drafts", drafts or 0, 0),
        ):  # fmt: skip
            whole(value, name, least)
        for name, given in (("model", model), ("draft_model", draft_model)):
            _check_model(name, given)
        self._group = None if isinstance(model, Model) else model
        self.model = model = model if isinstance(model, Model) else model.model
        """What was given; of processes that were given, the part of this one."""
        own_dtype = pages_dtype(model, kv_dtype)
        page = page_bytes(model, own_dtype) * (1 if self._group is None else self._group.tp)
        pages = page_count(kv_memory, page + (0 if draft_model is None else page_bytes(draft_model)))
        tokenizer = model.tokenizer if model.has_tokenizer else None
        self._decode: Decode = tokenizer.decode if tokenizer is not None else _no_text
        self._eos = frozenset(model.config.eos_ids) | (tokenizer.eos_ids if tokenizer is not None else frozenset())
        self.guides = Guides(tokenizer, model.config.vocab_size, self._eos)
        """Structured output on this vocabulary; `guides.check` may be called from other threads."""
        self.max_queue = max_queue
        self.max_length = min(model.config.max_positions, pages * PAGE)
        """Tokens that one sequence may have, prompt and output together."""
        self._cache = Cache(pages, prefix_cache)
        drafter = None
        if draft_model is not None:
            check_draft(draft_model, model)
            drafter = DraftModel(draft_model, pages, max_batch_tokens, level)
        if drafts is None:
            drafts = 0 if draft_model is None else 4
        self._scheduler = Scheduler(self._cache, max_batch_tokens, max_running, drafts, drafter, shares)
        self._pace = None if step_seconds is None else Pace(step_seconds, max_batch_tokens)
        if self._group is None and tp > 1:
            from lockstep.serve.tp.group import Group

            self._group = Group.share(model, tp)
        if self._group is None:
            self._runner = Runner(model, pages, own_dtype, max_batch_tokens, level)
        else:
            self._runner = self._group.runner(pages, own_dtype, max_batch_tokens, level)
        self._sequences: dict[int, Sequence] = {}
        self._streams: dict[int, OutputStream] = {}
        self._guides: dict[int, Guide] = {}
        """Of the sequences with structured output."""
        self._masks = ThreadPoolExecutor(1, "masks")
        self._uids, self._requests = count(), count()
        self._steps = self._computed = self._guessed = self._right = 0
        self._debug = debug

    def add_request(
        self,
        prompt_ids: Many[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        salt: str | None = None,
        client: str = "",
        embedding: Embedding | None = None,
    ) -> int:
        """Queue a prompt; its `params.n` choices run side by side. Gives the request's id, which outputs carry.

        priority: smaller goes first. timeout: seconds until it ends with finish_reason `timeout`.
        salt: prefixes are shared only among requests with the same one. client: whose it is; while requests wait, each
        client gets the same share. embedding: it gets a vector, with its only output, and no tokens (params are not
        read).
        Raises PromptTooLong, QueueFull, or LockstepError for a token id outside the vocabulary or a wrong structure.
        """
        params = (params or SamplingParams()) if embedding is None else SamplingParams(max_tokens=0)
        limit = self.check(prompt_ids, params)
        request = next(self._requests)
        seed = draw_seed() if params.seed is None else params.seed
        deadline = None if timeout is None else time.monotonic() + timeout
        for choice in range(params.n):
            sequence = Sequence(
                next(self._uids), request, choice, params, seed, len(prompt_ids), list(prompt_ids), limit,
                priority, deadline, salt, client, None if embedding is None else Pool(embedding),
            )  # fmt: skip
            self._sequences[sequence.uid] = sequence
            self._streams[sequence.uid] = OutputStream(sequence, self._decode)
            if params.structured_outputs is not None:
                self._guides[sequence.uid] = self.guides.guide(params.structured_outputs)
            self._scheduler.add(sequence)
        return request

    def check(self, prompt_ids: Many[int], params: SamplingParams) -> int:
        """The length the request may grow to; raises what `add_request` would raise."""
        vocabulary = self.model.config.vocab_size
        if not prompt_ids:
            raise LockstepError("the prompt has no tokens: give at least one.")
        length, wanted = len(prompt_ids), params.max_tokens
        if length + (1 if wanted is None else wanted) > self.max_length:
            asked = "" if wanted is None else f" and max_tokens asks for {wanted} more"
            raise PromptTooLong(
                # OpenAI's words: clients look for them to tell this error from others.
                f"this model's maximum context length is {self.max_length} tokens, but the prompt has {length}{asked}: "
                "shorten the prompt or lower max_tokens."
            )
        wrong = next((t for t in (*prompt_ids, *params.logit_bias) if not 0 <= t < vocabulary), None)
        if wrong is not None:
            raise LockstepError(f"token id {wrong} is not in the vocabulary: ids go from 0 to {vocabulary - 1}.")
        if self.max_queue is not None and params.n > self.max_queue:
            raise LockstepError(f"n is {params.n}, but no more than {self.max_queue} may wait here: ask for fewer.")
        if self.max_queue is not None and len(self._scheduler.waiting) + params.n > self.max_queue:
            raise QueueFull(f"{len(self._scheduler.waiting)} requests are waiting already: try again later.")
        self.guides.check(params.structured_outputs)
        return self.max_length if wanted is None else length + wanted

    def abort(self, request: int) -> list[Output]:
        """End a request at once and free its pages; its last outputs, with finish_reason `abort`."""
        mine = [s for s in self._sequences.values() if s.request == request]
        return [self._finish(sequence, "abort") for sequence in mine]

    def has_work(self) -> bool:
        return bool(self._sequences)

    def seed_of(self, request: int) -> int:
        """The seed a running request draws with: its own, or the one the engine drew for it."""
        return next(s.seed for s in self._sequences.values() if s.request == request)

    def step(self) -> list[Output]:
        """One forward pass over the next batch; what it added to each choice that has something to tell."""
        outputs = self._expired()
        step = self._scheduler.schedule(None if self._pace is None else self._pace.rows)
        if step.chunks:
            rows, plan = readings(step, self._sequences)
            self._look_ahead(plan)
            began = time.perf_counter()
            hidden, logits = self._runner.run(step, rows)
            if self._pace is not None:
                self._pace.ran(step.tokens, time.perf_counter() - began)
            self._steps += 1
            self._computed += step.tokens
            outputs += self._read(plan, hidden, logits)
        if self._debug:
            self._cache.check(self._scheduler.running)
        return outputs

    def generate(
        self, prompts: str | Many[str | Many[int]], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete prompts (texts or token ids), all in one batch, each as if it were alone.

        params: one for all or one for each. Gives n completions per prompt, in order of prompt and choice.
        """
        return offline.generate(self, prompts, params)

    def stats(self) -> Stats:
        cache, scheduler = self._cache, self._scheduler
        return Stats(
            len(scheduler.running), len(scheduler.waiting), cache.total, cache.used, cache.radix.evictable,
            scheduler.preemptions, self._steps, self._computed, self._guessed, self._right,
        )  # fmt: skip

    def clear_cache(self) -> None:
        """Forget every cached prefix that no running sequence reads."""
        self._cache.clear()

    def update_weights(self, state: Mapping[str, Tensor]) -> None:
        """Serve other weights from the next step on, with exactly the bits of an engine started on them.

        state: a tensor for each of `model.decoder.named_parameters()`. Cached keys and values are forgotten; running
        requests keep the tokens they have and compute their keys and values again.
        Raises LockstepError, having changed nothing, when names or shapes do not fit.
        """
        if self._group is None:
            replace_weights(self.model, state)
        else:
            self._group.update_weights(state)
        self._scheduler.restart()
        self._runner.prepare()

    def embed(self, prompts: Many[Many[int]], pooling: Pooling = "mean", unit: bool = True) -> list[Vector]:
        """A vector for each prompt of token ids: see `embedding.embed`, whose bytes these are."""
        return offline.embed(self, prompts, Embedding(pooling, unit))

    def watch(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason, from another thread, when one of the engine's other processes ends."""
        if self._group is not None:
            self._group.processes.watch(tell)

    def close(self) -> None:
        """End the engine's other processes, where it has some. It cannot be used afterwards."""
        if self._group is not None:
            self._group.close()

    def _expired(self) -> list[Output]:
        now = time.monotonic()
        late = [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]
        return [self._finish(sequence, "timeout") for sequence in late]

    def _look_ahead(self, plan: list[Reading]) -> None:
        """Let the masks of structured output be computed while the forward pass runs."""
        for reading in plan:
            guide = self._guides.get(reading.sequence.uid)
            if guide is not None and reading.draft is not None:
                guide.look_ahead(reading.draft, self._masks)

    def _read(self, plan: list[Reading], hidden: Tensor, logits: Tensor) -> list[Output]:
        """Pool hidden states, score prompt tokens and draw the next ones from the rows of logits."""
        for reading in plan:
            if reading.sequence.pool is not None:
                own = hidden[reading.rows.start : reading.rows.stop]
                reading.sequence.pool.add(reading.sequence.computed, own.double().numpy())
        damaged = {reading.sequence.uid for reading in plan if not self._score_prompt(reading, logits)}
        drawing = [r for r in plan if r.draft is not None and r.sequence.uid not in damaged]
        drawn = draw_all(drawing, logits, self._guides) if drawing else []
        told = drawn_scores(self._runner, logits, drawing, [draw.tokens for draw in drawn])
        known = {r.sequence.uid: pair for r, *pair in zip(drawing, drawn, told, strict=True)}
        outputs: list[Output] = []
        for reading in plan:
            if reading.sequence.uid in damaged:
                outputs.append(self._finish(reading.sequence, "abort", error=DAMAGED))
            else:
                outputs += self._advance(reading, *known.get(reading.sequence.uid, (None, ())))
        return outputs

    def _score_prompt(self, reading: Reading, logits: Tensor) -> bool:
        """Whether the scores of prompt tokens, where some are wanted, are numbers."""
        sequence, scored = reading.sequence, reading.scored
        if scored:
            tokens = sequence.tokens[scored.start : scored.stop]
            own = logits[reading.first : reading.first + len(scored)]
            found = scores(self._runner, own, tokens, sequence.params.prompt_logprobs or 0)
            self._streams[sequence.uid].score_prompt(found)
            sequence.scored = scored.stop - 1
            return all(math.isfinite(score.logprob) for score in found)
        return True

    def _advance(self, reading: Reading, draw: Draw | None, told: tuple[TokenScore, ...]) -> list[Output]:
        """The sequence after its part of the step."""
        sequence = reading.sequence
        if draw is None:
            self._scheduler.advance(sequence, reading.computed)
            return [] if sequence.remaining else [self._finish_prompt(sequence)]
        if draw.error is not None:
            return [self._finish(sequence, "abort", error=draw.error, refused=draw.refused)]
        self._guessed += len(reading.draft or ())
        self._right += len(draw.tokens) - 1
        self._scheduler.advance(sequence, reading.computed + len(draw.tokens) - 1)
        return self._tell(sequence, draw.tokens, told)

    def _tell(self, sequence: Sequence, drawn: tuple[int, ...], told: tuple[TokenScore, ...]) -> list[Output]:
        """Pass tokens on until one ends the choice."""
        params, stream, guide = sequence.params, self._streams[sequence.uid], self._guides.get(sequence.uid)
        left = sequence.limit - len(sequence.tokens) + len(drawn)
        for i, token in enumerate(drawn):
            by_id = token in params.stop_token_ids
            ended = by_id or (token in self._eos and not params.ignore_eos)
            stop = stream.push(token, told[i : i + 1], hidden=ended)
            if ended or stop is not None:
                return [self._finish(sequence, "stop", token if by_id else stop)]
            if i + 1 == len(drawn) and guide is not None and guide.finished:
                return [self._finish(sequence, "stop")]
            if i + 1 == left:
                return [self._finish(sequence, "length")]
        return [stream.take()] if stream.has_text else []

    def _finish_prompt(self, sequence: Sequence) -> Output:
        """max_tokens 0: the prompt was only to be read."""
        if sequence.pool is None:
            return self._finish(sequence, "length")
        vector = sequence.pool.vector()
        if not np.isfinite(vector).all():
            return self._finish(sequence, "abort", error=DAMAGED)
        return replace(self._finish(sequence, "length"), vector=vector.astype("<f4").tobytes())

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop: str | int | None = None,
        error: str | None = None,
        refused: bool = False,
    ) -> Output:
        """The choice is over: its last output. Its pages are free, or cached, from here on."""
        del self._sequences[sequence.uid]
        self._scheduler.remove(sequence)
        self._guides.pop(sequence.uid, None)
        return self._streams.pop(sequence.uid).finish(reason, stop, error, refused)


def _check_model(name: str, given: object) -> None:
    """A name or a path is no model yet."""
    if isinstance(given, str | PathLike):
        raise LockstepError(f"{name} is {str(given)!r}: give what is loaded of it, lockstep.load({str(given)!r}).")


def _no_text(ids: list[int]) -> str:
    """A model without a tokenizer serves token ids."""
    return ""
