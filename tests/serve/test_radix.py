"""The radix cache against a brute-force model: a dictionary from each prefix to its page."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep.serve.pool import PagePool
from lockstep.serve.radix import RadixCache

paths = st.lists(st.integers(0, 2), min_size=1, max_size=7)
salts = st.sampled_from([None, "a"])


class RadixMachine(RuleBasedStateMachine):
    """Pages are numbered as they come; `used` is when a prefix was last matched or inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixCache()
        self.page: dict[tuple, int] = {}
        self.used: dict[tuple, int] = {}
        self.locked: list[tuple[object, tuple]] = []
        self.next_page = self.clock = 0

    def known(self, salt: object, path: list[int]) -> list[tuple]:
        """The prefixes of the path that are in the cache, shortest first."""
        found = []
        for end in range(1, len(path) + 1):
            if (salt, *path[:end]) not in self.page:
                break
            found.append((salt, *path[:end]))
        return found

    def touch(self, prefixes: list[tuple]) -> None:
        self.clock += 1
        self.used |= dict.fromkeys(prefixes, self.clock)

    def protected(self) -> set[tuple]:
        return {prefix[:end] for _, prefix in self.locked for end in range(2, len(prefix) + 1)}

    @rule(path=paths, salt=salts)
    def match(self, path, salt):
        _, pages = self.tree.match([(k,) for k in path], salt)
        known = self.known(salt, path)
        assert pages == [self.page[prefix] for prefix in known]
        self.touch(known)

    @rule(path=paths, salt=salts)
    def insert(self, path, salt):
        known = self.known(salt, path)
        offered = list(range(self.next_page, self.next_page + len(path)))
        self.next_page += len(path)
        _, kept = self.tree.insert([(k,) for k in path], offered, salt)
        assert kept == [self.page[prefix] for prefix in known] + offered[len(known) :]
        for end in range(len(known) + 1, len(path) + 1):
            self.page[(salt, *path[:end])] = offered[end - 1]
        self.touch([(salt, *path[:end]) for end in range(1, len(path) + 1)])

    @rule(path=paths, salt=salts)
    def lock(self, path, salt):
        node, pages = self.tree.match([(k,) for k in path], salt)
        known = self.known(salt, path)
        self.touch(known)
        self.tree.lock(node)
        self.locked.append((node, (salt, *path[: len(pages)])))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data):
        node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)

    @rule(count=st.integers(0, 6))
    def evict(self, count):
        expected = []
        protected = self.protected()
        for _ in range(count):
            parents = {prefix[:-1] for prefix in self.page}
            leaves = [p for p in self.page if p not in parents and p not in protected]
            if not leaves:
                break
            oldest = min(leaves, key=lambda p: self.used[p])
            expected.append(self.page.pop(oldest))
        assert self.tree.evict(count) == expected

    @invariant()
    def counts(self):
        assert self.tree.pages == len(self.page)
        assert self.tree.locked == len(self.protected())
        assert self.tree.evictable == len(self.page) - len(self.protected())

    def teardown(self):
        """A held node still leads to its pages, whatever was split above it."""
        for node, prefix in self.locked:
            pages, walk = [], node
            while walk is not None:
                pages = walk.pages + pages
                walk = walk.parent
            assert pages == [self.page[prefix[:end]] for end in range(2, len(prefix) + 1)]


RadixMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRadix = RadixMachine.TestCase


class LongRadixMachine(RadixMachine):
    """The same for long: 200 runs of up to 50 steps are 10,000 steps."""


LongRadixMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRadixLong = pytest.mark.slow(LongRadixMachine.TestCase)


def test_one_path_is_one_node():
    tree = RadixCache()
    node, _ = tree.insert([(1,), (2,), (3,)], [7, 8, 9])
    assert node.keys == [(1,), (2,), (3,)]
    assert node.pages == [7, 8, 9]
    upper, pages = tree.match([(1,), (2,), (5,)])
    assert pages == [7, 8] == upper.pages
    assert node.pages == [9]
    assert node.parent is upper


def test_unlock_of_an_unlocked_node_is_a_bug():
    tree = RadixCache()
    node, _ = tree.insert([(1,)], [0])
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(node)


def test_pool_hands_out_low_pages_and_refuses_a_second_return():
    pool = PagePool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([1])
    assert pool.take(1) == [1]
    assert pool.free == 1
    pool.give_back([2])
    with pytest.raises(ValueError, match="already free"):
        pool.give_back([2])
    with pytest.raises(ValueError, match="asked of"):
        pool.take(3)
