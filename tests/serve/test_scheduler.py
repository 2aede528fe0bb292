"""Scheduler and cache with a memory that remembers, for every slot, which prefix was written there.

Pages have 4 tokens here. Before a chunk is "computed" each slot it attends to must hold the very prefix of its
sequence: that is what the radix tree, the page tables, eviction and preemption are for.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep.serve import cache, scheduler, sequence
from lockstep.serve.cache import Cache
from lockstep.serve.params import SamplingParams
from lockstep.serve.scheduler import Scheduler
from lockstep.serve.sequence import Sequence

PAGE = 4


@pytest.fixture(autouse=True, scope="module")
def small_pages():
    with pytest.MonkeyPatch.context() as patch:
        for module in (cache, scheduler, sequence):
            patch.setattr(module, "PAGE", PAGE)
        yield


class Machine:
    """The engine without a model: the next token is a function of the tokens before it."""

    def __init__(self, pages: int, budget: int, running: int, prefix_cache: bool = True, drafts: int = 0) -> None:
        self.cache = Cache(pages, prefix_cache)
        self.scheduler = Scheduler(self.cache, budget, running, drafts)
        self.memory: dict[tuple[int, int], tuple] = {}
        self.alive: dict[int, Sequence] = {}
        self.finished: dict[int, list[int]] = {}
        self.uids = 0
        self.computed = self.accepted = 0

    def add(
        self, prompt: list[int], new: int, salt: str | None = None, priority: int = 0, client: str = ""
    ) -> Sequence:
        one = Sequence(
            self.uids, self.uids, 0, SamplingParams(), 0, len(prompt), list(prompt), len(prompt) + new, priority,
            salt=salt, client=client,
        )  # fmt: skip
        self.uids += 1
        self.alive[one.uid] = one
        self.scheduler.add(one)
        return one

    def step(self, mixed: int | None = None):
        decoding = sum(one.decoding for one in self.scheduler.running)
        step = self.scheduler.schedule(mixed)
        assert step.tokens <= self.scheduler.max_batch_tokens
        if mixed is not None and decoding:
            assert step.tokens <= max(mixed, decoding + 16)
        written = [self._run(chunk) for chunk in step.chunks]
        assert len(set().union(*written)) == sum(map(len, written)), "two sequences wrote one slot"
        self.computed += step.tokens
        for chunk in step.chunks:
            self._take(self.alive[chunk.sequence], chunk)
        self.cache.check(self.scheduler.running)
        return step

    def _take(self, one: Sequence, chunk) -> None:
        """What the engine does with a chunk's rows."""
        known = len(chunk.tokens) - chunk.drafts
        if not chunk.samples:
            return self.scheduler.advance(one, known)
        drawn = 0
        for guess in (*chunk.tokens[known:], None):
            one.tokens.append(following(one.tokens))
            drawn += 1
            if one.tokens[-1] != guess:
                break
        self.accepted += drawn - 1
        self.scheduler.advance(one, known + drawn - 1)
        assert len(one.tokens) <= one.limit
        if len(one.tokens) == one.limit:
            self.finish(one)

    def _run(self, chunk) -> set[tuple[int, int]]:
        one = self.alive[chunk.sequence]
        known = chunk.end - chunk.drafts
        assert list(chunk.tokens[: known - chunk.start]) == one.tokens[chunk.start : known]
        for position in range(chunk.start):
            slot = (chunk.pages[position // PAGE], position % PAGE)
            assert self.memory[slot] == (one.salt, *one.tokens[: position + 1])
        slots = [(chunk.pages[p // PAGE], p % PAGE) for p in range(chunk.start, chunk.end)]
        path = (one.salt, *one.tokens[: chunk.start], *chunk.tokens)
        for position, slot in zip(range(chunk.start, chunk.end), slots, strict=True):
            self.memory[slot] = path[: position + 2]
        return set(slots)

    def finish(self, one: Sequence) -> None:
        self.finished[one.uid] = one.tokens
        del self.alive[one.uid]
        self.scheduler.remove(one)

    def drain(self) -> None:
        for _ in range(10_000):
            if not self.alive:
                return
            assert self.step().chunks, "nothing could run"
        raise AssertionError("the scheduler does not come to an end")


def following(tokens: list[int]) -> int:
    return (sum(tokens[-3:]) + len(tokens)) % 3


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class ServingMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(9, 24), budget=st.integers(1, 24), running=st.integers(1, 6), prefix=st.booleans(),
        drafts=st.integers(0, 4),
    )  # fmt: skip
    def begin(self, pages, budget, running, prefix, drafts):
        assert cache.PAGE == PAGE
        self.machine = Machine(pages, budget, running, prefix, drafts)

    @rule(prompt=prompts, new=st.integers(1, 16), salt=st.sampled_from([None, "x"]), priority=st.integers(0, 1))
    def add(self, prompt, new, salt, priority):
        self.machine.add(prompt, new, salt, priority)

    @rule(count=st.integers(1, 8), mixed=st.none() | st.integers(1, 24))
    def run(self, count, mixed):
        for _ in range(count):
            self.machine.step(mixed)

    @precondition(lambda self: self.machine.alive)
    @rule(data=st.data())
    def abort(self, data):
        self.machine.finish(self.machine.alive[data.draw(st.sampled_from(sorted(self.machine.alive)))])

    @rule()
    def drop_cache(self):
        self.machine.cache.clear()
        assert self.machine.cache.radix.evictable == 0

    @rule()
    def update_weights(self):
        """Everything that was computed is wrong from now on."""
        self.machine.scheduler.restart()
        self.machine.memory.clear()
        assert self.machine.cache.pool.free == self.machine.cache.total

    @invariant()
    def accounts(self):
        if hasattr(self, "machine"):
            box = self.machine.cache
            assert box.used + box.pool.free + box.radix.evictable == box.total
            box.check(self.machine.scheduler.running)

    def teardown(self):
        if hasattr(self, "machine"):
            self.machine.drain()
            assert self.machine.cache.used == 0


ServingMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestServing = ServingMachine.TestCase


class LongServingMachine(ServingMachine):
    """200 runs of up to 50 rules."""


LongServingMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestServingLong = pytest.mark.slow(LongServingMachine.TestCase)


def test_decode_is_never_starved_by_a_long_prompt():
    machine = Machine(pages=200, budget=8, running=4)
    decoding = machine.add([0, 1], 30)
    machine.step()
    machine.add([1] * 300, 1)
    for _ in range(10):
        step = machine.step()
        sizes = {chunk.sequence: len(chunk.tokens) for chunk in step.chunks}
        assert sizes == {decoding.uid: 1, 1: 7}


def test_prompts_are_read_in_smaller_chunks_while_somebody_decodes_and_go_on_in_any_case():
    machine = Machine(pages=400, budget=100, running=30)
    machine.add([1] * 90, 30)
    assert machine.step(40).tokens == 90, "nobody waits for a token"
    machine.add([1] * 300, 1)
    assert machine.step(40).tokens == 40
    assert machine.step(1).tokens == 1 + 16, "a step that is slow already reads some of a prompt too"


def test_outputs_under_pressure_are_those_of_a_large_pool():
    requests = [([i % 2] * random.Random(i).randint(1, 18), random.Random(i + 50).randint(1, 16)) for i in range(12)]
    outputs = []
    for pages in (200, 10):
        machine = Machine(pages, budget=16, running=6)
        for prompt, new in requests:
            machine.add(prompt, new)
        machine.drain()
        outputs.append(machine.finished)
    assert outputs[0] == outputs[1]
    assert machine.scheduler.preemptions > 0


def test_a_shared_prefix_is_computed_once_even_at_the_same_moment():
    machine = Machine(pages=300, budget=64, running=32)
    prefix = [0, 1, 1] * 20
    for i in range(32):
        machine.add([*prefix, i % 3, 2], 1)
    machine.drain()
    # The first computes 62 tokens, the others the 2 behind the 15 shared pages.
    assert machine.computed == 62 + 31 * 2


def test_generated_tokens_are_found_by_the_next_turn():
    machine = Machine(pages=50, budget=64, running=4)
    first = machine.add([0, 1, 0, 1], 12)
    machine.drain()
    turn = machine.add([*first.tokens, 2], 1)
    machine.drain()
    assert turn.cached_tokens == 12  # the 15 computed tokens have 3 full pages


def test_cached_tokens_leave_one_token_to_compute():
    machine = Machine(pages=50, budget=64, running=4)
    machine.add([1] * 8, 1)
    machine.drain()
    same = machine.add([1] * 8, 1)
    machine.drain()
    assert same.cached_tokens == 4


def test_salt_separates():
    machine = Machine(pages=50, budget=64, running=4)
    machine.add([1] * 12, 1, salt="a")
    machine.drain()
    other, same = machine.add([1] * 12, 1, salt="b"), machine.add([1] * 12, 1, salt="a")
    machine.drain()
    assert (other.cached_tokens, same.cached_tokens) == (0, 8)


def test_priority_goes_first_and_arrival_decides_among_equals():
    machine = Machine(pages=50, budget=4, running=1)
    order = [machine.add([1], 1, priority=p).uid for p in (1, 0, 1, 0)]
    machine.drain()
    assert list(machine.finished) == [order[1], order[3], order[0], order[2]]


def test_guesses_save_steps_and_change_nothing(monkeypatch):
    monkeypatch.setitem(globals(), "following", lambda tokens: len(tokens) // 2 % 3)
    machines = [Machine(pages=50, budget=64, running=4, drafts=drafts) for drafts in (0, 4)]
    for machine in machines:
        machine.add([0, 1, 2], 60)
        machine.add([1, 1], 60)
        machine.steps = 0
        while machine.alive:
            machine.step()
            machine.steps += 1
    assert machines[0].finished == machines[1].finished
    assert machines[0].steps == 60
    assert machines[1].steps < 25
    assert machines[1].accepted > 70
