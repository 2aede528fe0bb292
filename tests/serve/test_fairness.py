"""Shares of waiting clients, on the scheduler without a model."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lockstep.serve.fairness import FairShare
from tests.serve.test_scheduler import Machine, small_pages  # noqa: F401 - a fixture


def started(machine: Machine) -> list[str]:
    """The clients in the order in which their sequences start, a step at a time until all are finished."""
    order: list[str] = []
    seen: set[int] = set()
    while machine.alive:
        machine.step()
        for one in machine.scheduler.running:
            if one.uid not in seen:
                seen.add(one.uid)
                order.append(one.client)
    return order


def add(machine: Machine, client: str, length: int = 4, new: int = 3, priority: int = 0) -> None:
    prompt = [random.Random(machine.uids).randint(0, 1) for _ in range(length)]
    machine.add(prompt, new, priority=priority, client=client)


def test_a_flood_of_one_client_does_not_hold_up_another():
    machine = Machine(pages=60, budget=32, running=2)
    for _ in range(40):
        add(machine, "flood")
    machine.step()
    add(machine, "quiet")
    machine.step()
    waiting = [one.client for one in machine.scheduler.waiting]
    steps = 0
    while "quiet" in [one.client for one in machine.scheduler.waiting]:
        machine.step()
        steps += 1
    # It is the next to start: it waits for one of the two running sequences to end, not for the 38 before it.
    assert waiting.count("flood") >= 37
    assert steps <= 4
    machine.drain()


def test_clients_share_in_proportion_to_tokens_not_to_requests():
    machine = Machine(pages=100, budget=32, running=1)
    for _ in range(40):
        add(machine, "short", length=2, new=2)
        add(machine, "long", length=8, new=8)
    order = started(machine)[:30]
    # A long one counts 4 times as much as a short one, or a little less (its last token is never computed).
    assert 3 * order.count("long") <= order.count("short") <= 6 * order.count("long")


def test_a_client_with_a_larger_share_gets_so_much_more():
    machine = Machine(pages=100, budget=32, running=1)
    machine.scheduler._share = FairShare({"paying": 3.0})
    for _ in range(60):
        add(machine, "paying")
        add(machine, "free")
    order = started(machine)[:40]
    assert order.count("paying") == 3 * order.count("free")


def test_priority_is_before_fairness():
    machine = Machine(pages=60, budget=32, running=1)
    for _ in range(6):
        add(machine, "a", priority=0)
    add(machine, "b", priority=1)
    assert started(machine)[:6] == ["a"] * 6


def test_one_client_is_served_in_order_of_arrival():
    machine = Machine(pages=60, budget=32, running=1)
    for _ in range(8):
        add(machine, "", new=1)
    machine.drain()
    assert list(machine.finished) == list(range(8))


def test_absence_earns_no_credit():
    machine = Machine(pages=100, budget=32, running=1)
    for _ in range(10):
        add(machine, "busy", new=2)
    for _ in range(8):
        machine.step()
    for _ in range(10):
        add(machine, "new", new=2)
        add(machine, "busy", new=2)
    order = started(machine)[:8]
    assert 3 <= order.count("new") <= 5  # and not 8 of 8, to make up for the time before it came


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 6)), min_size=6, max_size=40))
def test_while_two_wait_neither_gets_much_more(requests):
    """The bound of the paper: the service of two clients that both wait differs by no more than a batch's worth."""
    machine = Machine(pages=200, budget=64, running=3)
    for client, length, new in requests:
        add(machine, client, length, new)
    share: FairShare = machine.scheduler._share
    largest = 3 * (12 + 2 * 6)
    while machine.alive:
        machine.step()
        waiting = {one.client for one in machine.scheduler.waiting}
        given_now = [share._given[client] for client in waiting]
        assert not given_now or max(given_now) - min(given_now) <= largest
    assert not share._present


def test_clients_that_are_gone_are_forgotten():
    machine = Machine(pages=60, budget=32, running=4)
    for number in range(1000):
        add(machine, f"user {number}", new=1)
        machine.step()
    machine.drain()
    assert len(machine.scheduler._share._given) < 200
