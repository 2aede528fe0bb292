"""Structured output: what a completion must look like, and which tokens that allows at each place.

The grammars are llguidance's (https://github.com/guidance-ai/llguidance), compiled once for each structure. A guide
walks with one choice: it depends on the tokens drawn alone, so batching, preemption and guesses do not change it.
What a step's draws need is computed on a thread beside its forward pass (llguidance lets other threads run).
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import LockstepError
from lockstep.serve.deep_stack import on_a_deep_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from lockstep.model.tokenizer import Tokenizer

Allowed = NDArray[np.bool_]
SPACE: Any = {"whitespace_pattern": r"[ \n\r\t]{1,20}"}
"""Between JSON tokens. Without an end to it, a model may write spaces until its tokens run out."""
_TITLES = {
    "json": "JSON schema", "json_object": "JSON object", "regex": "regular expression", "choice": "choice",
    "grammar": "grammar",
}  # fmt: skip
_KINDS = tuple(_TITLES)
_LONGEST = 2**19
"""Characters of a grammar. A rule for each few of them, one within the other, is as deep as its compiler recurses."""
_KEPT = 64
"""Structures that stay compiled."""
_KEPT_SIZE = 2**20
"""Characters of all of these together: a compiled structure takes some hundred times as much memory."""


class GuideStuck(LockstepError):
    """No token can go on: the grammar has become too complex, or the vocabulary cannot write what it asks for."""


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of the first five; the whole completion follows it. Raises LockstepError for none, or two.

    A reasoning model may think before it: `closes` is the token that ends a thought, and `opens` the one that begins
    it, None where the prompt has begun it already.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # where it is read from JSON

    json: Mapping[str, Any] | str | None = None
    """A JSON schema; the properties come in its order."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """In the syntax of Rust's regex crate; matched from beginning to end."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in llguidance's form of Lark."""
    opens: int | None = None
    closes: int | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            said = f"has {' and '.join(given)}" if given else "is empty"
            raise LockstepError(f"structured_outputs {said}: give exactly one of {', '.join(_KINDS)}.")
        if self.json is not None and not isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, allow_nan=False))  # a value that can be hashed
            except (TypeError, ValueError, RecursionError) as error:
                raise LockstepError(f"the JSON schema cannot be written as JSON: {error}.") from error
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise LockstepError("structured_outputs.choice must hold one text or more, none of them empty.")

    def compiled(self) -> str:
        """The grammar as llguidance takes it; ValueError where it is not even JSON."""
        from llguidance import LLMatcher as matcher

        if self.json is not None:
            return matcher.grammar_from_json_schema(str(self.json), overrides=SPACE)
        if self.json_object:
            return matcher.grammar_from_json_schema({"type": "object"}, overrides=SPACE)
        if self.regex is not None:
            return matcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, self.choice)))
        return matcher.grammar_from_lark(self.grammar or "")

    @property
    def title(self) -> str:
        """How a message calls it."""
        return next(title for kind, title in _TITLES.items() if getattr(self, kind) not in (None, False))

    @property
    def size(self) -> int:
        """Characters of what was given."""
        texts = (str(self.json or ""), self.regex or "", self.grammar or "", *(self.choice or ()))
        return sum(map(len, texts))


@dataclass(frozen=True)
class Thinking:
    """What may come before the structure: free tokens, the end tokens not among them, up to the one that closes."""

    opens: int | None
    closes: int
    free: Allowed


class Guide:
    """Walks with the tokens of one choice: `allowed` before a draw, `accept` after it, until `finished`."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, thinking: Thinking | None = None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._thinking = thinking
        """None once the structure has begun."""
        self._open = thinking is not None and thinking.opens is None
        """A thought has begun."""
        self._guesses: tuple[int, ...] = ()
        self._ahead: Future[list[Allowed]] | None = None
        self._known: list[Allowed] = []
        """The masks of the next draw and of those after it, as long as the guesses are drawn."""

    def look_ahead(self, guesses: tuple[int, ...], helper: Executor) -> None:
        """Begin to compute on another thread what `allowed` will give next, and after each guess.

        Until the next `allowed` nothing else may be asked of the guide: the thread has its matcher.
        """
        if self._ahead is None:
            self._guesses, self._known = guesses, []
            self._ahead = helper.submit(self._masks, guesses)

    def allowed(self) -> Allowed:
        """bool [V]: the tokens that may come next, the end tokens among them once the text is complete.

        Raises GuideStuck when there are none.
        """
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._known = ahead.result()
        return self._known.pop(0) if self._known else self._mask(self._matcher)

    def accept(self, token: int) -> None:
        if self._guesses[:1] != (token,):
            self._known = []
        self._guesses = self._guesses[1:]
        thinking = self._thinking
        if thinking is not None and (self._open or token == thinking.opens):
            self._open = True
            if token == thinking.closes:
                self._thinking = None
            return
        self._thinking = None
        self._matcher.consume_token(token)

    def _masks(self, guesses: tuple[int, ...]) -> list[Allowed]:
        """The first mask, and one more after each guess, up to the first guess that the structure does not allow."""
        masks = [self._mask(self._matcher)]
        if self._thinking is not None:  # guesses inside a thought, and where it may begin, are looked at one by one
            return masks
        walker = self._matcher.deep_copy() if guesses else self._matcher
        for guess in guesses:
            if not masks[-1][guess] or not walker.consume_token(guess) or walker.is_stopped():
                break
            try:
                masks.append(self._mask(walker))
            except GuideStuck:  # it counts only when the guess is drawn: then it is met again
                break
        return masks

    def _mask(self, matcher: LLMatcher) -> Allowed:
        if self._thinking is None:
            return self._structured(matcher)
        if self._open:
            return self._thinking.free
        mask = self._structured(matcher).copy()
        mask[self._thinking.opens] = True
        return mask

    def _structured(self, matcher: LLMatcher) -> Allowed:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
        if matcher.is_error() or not mask.any():
            said = _first_line(matcher.get_error()) or "no token of this vocabulary can go on"
            raise GuideStuck(f"the structure cannot be followed any further ({said}): ask for a simpler one.")
        return mask

    @property
    def finished(self) -> bool:
        """Nothing can follow: the text is complete."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Guides:
    """Makes guides for one model's vocabulary. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = sorted(token for token in eos if token < vocabulary)
        self._words: LLTokenizer | None = None
        self._reading = Lock()
        """Held while the vocabulary is read."""
        self._known: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._lock = Lock()
        """Of what is known. Not held while a structure is compiled: the engine's thread asks for others meanwhile."""

    def check(self, structure: StructuredOutputs | None) -> None:
        """Compile it, or raise LockstepError with what is wrong with it. May take a second the first time."""
        if structure is None:
            return
        wrong = next((t for t in (structure.opens, structure.closes) if not 0 <= (t or 0) < self._vocabulary), None)
        if wrong is not None:
            raise LockstepError(f"token id {wrong} of structured_outputs is not in the vocabulary.")
        self._matcher(structure)

    def knows(self, structure: StructuredOutputs) -> bool:
        """Whether it is compiled."""
        with self._lock:
            return replace(structure, opens=None, closes=None) in self._known

    def guide(self, structure: StructuredOutputs) -> Guide:
        """A guide at the beginning of a completion."""
        matcher, thinking = self._matcher(structure), None
        if structure.closes is not None:
            free = np.ones(self._vocabulary, np.bool_)
            free[self._eos] = False
            thinking = Thinking(structure.opens, structure.closes, free)
        with self._lock:
            return Guide(matcher.deep_copy(), self._vocabulary, thinking)

    def _matcher(self, structure: StructuredOutputs) -> LLMatcher:
        structure = replace(structure, opens=None, closes=None)
        with self._lock:
            if structure in self._known:
                self._known.move_to_end(structure)
                return self._known[structure]
        compiled = on_a_deep_stack(lambda: self._compiled(structure))
        with self._lock:
            self._known[structure] = compiled
            size = sum(known.size for known in self._known)
            while len(self._known) > _KEPT or (size > _KEPT_SIZE and len(self._known) > 1):
                size -= self._known.popitem(last=False)[0].size
        return compiled

    def _compiled(self, structure: StructuredOutputs) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            grammar = structure.compiled()
            if len(grammar) > _LONGEST:
                raise ValueError(f"it has {len(grammar)} characters, and at most {_LONGEST} are read")
            matcher = LLMatcher(self._vocabulary_tree(), grammar, log_level=0)
            said = matcher.get_error()
        except ValueError as error:
            said = str(error)
        if said:
            raise LockstepError(f"the {structure.title} cannot be followed: {_first_line(said)}.")
        return matcher

    def _vocabulary_tree(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise LockstepError("this model has no tokenizer, and structured output is about text: leave it out.")
        with self._reading:
            if self._words is None:
                from llguidance import LLTokenizer

                text = self._tokenizer.backend.to_str()
                self._words = LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._eos or None)
            return self._words


def _first_line(text: str) -> str:
    """The library draws its errors over several lines: the ones that say something, as one; not its inner state."""
    lines: Sequence[str] = [line.strip() for line in re.split("<state>|<backtrace>", text)[0].splitlines()]
    return "; ".join(line for line in lines if line and not set(line) <= set("^| "))[:300].rstrip(".")
