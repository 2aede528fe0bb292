"""Messages of a table: both ends agree on their order, for every schedule, and each result is asked for once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.mailbox import Letter, letters
from lockstep.parallel.schedules import NAMES, Step, Table, embedding_rows, messages, schedule, told
from lockstep.parallel.schedules.dependencies import Need, gives, needs

tables = st.builds(schedule, st.sampled_from(NAMES), st.integers(1, 4), st.sampled_from([4, 6, 8]))


@given(tables, st.booleans())
def test_what_is_sent_is_what_is_needed(table: Table, tied: bool) -> None:
    """Walk the table with queues: whenever a step needs a result of another device, its queue can give it."""
    order = letters(table, tied)
    position = dict.fromkeys(order, 0)
    arrived: set[Letter] = set()
    sent: set[tuple[int, Letter]] = set()
    for node in table.program.nodes:
        for part in node.step.parts:
            group = table.group(node.device, part.chunk)
            if part.kind == "F" and group > 0:
                _take(Letter("x", part.micro_batch, group - 1), table, node.device, order, position, arrived, sent)
            if part.kind in ("B", "BW") and group < table.groups - 1:
                _take(Letter("dx", part.micro_batch, group + 1), table, node.device, order, position, arrived, sent)
            if part.kind == "F":
                sent.add((node.device, Letter("x", part.micro_batch, group)))
            if part.kind in ("B", "BW"):
                sent.add((node.device, Letter("dx", part.micro_batch, group)))
                if group == 0:
                    sent.add((node.device, Letter("tied", part.micro_batch, 0)))
    first, last = table.holder(0)[0], table.holder(table.groups - 1)[0]
    for pair, sequence in order.items():
        rest = sequence[position[pair] :]
        assert all(letter.kind == "tied" for letter in rest), "a message that nobody takes"
        assert all((pair[0], letter) in sent for letter in sequence)
    rows = [letter for sequence in order.values() for letter in sequence if letter.kind == "tied"]
    assert len(rows) == (table.micro_batches if tied and first != last else 0)


def _take(
    letter: Letter, table: Table, device: int, order: dict[tuple[int, int], list[Letter]],
    position: dict[tuple[int, int], int], arrived: set[Letter], sent: set[tuple[int, Letter]],
) -> None:  # fmt: skip
    source = table.holder(letter.group)[0]
    if source == device:
        assert (device, letter) in sent
        return
    while letter not in arrived:
        following = order[source, device][position[source, device]]
        assert (source, following) in sent, f"{letter} stands behind {following}, which was not sent yet: a deadlock"
        arrived.add(following)
        position[source, device] += 1
    arrived.remove(letter)


@given(tables)
def test_rows_of_a_tied_embedding_are_taken_when_nothing_more_is_needed_for_them(table: Table) -> None:
    """The first group's device sends them although the last one's stops to wait; and few wait for the end."""
    (first, chunk), last = table.holder(0), table.holder(table.groups - 1)[0]
    found = embedding_rows(table)
    assert not found or first != last
    for position, numbers in found.items():
        sent = {
            part.micro_batch
            for step in _done(table, last, position + 1)[first]
            for part in step.parts
            if part.kind in ("B", "BW") and part.chunk == chunk
        }
        assert sent.issuperset(numbers)
    if table.name == "1f1b" and table.stages > 1:
        assert sum(map(len, found.values())) == max(0, table.micro_batches - table.stages + 1)


def _done(table: Table, stopped: int, most: int) -> list[tuple[Step, ...]]:
    """The steps that each device can do when one of them does so many at most."""
    counts, given, before = [0] * table.stages, set[Need](), -1
    while sum(counts) != before:
        before = sum(counts)
        for device, row in enumerate(table.rows):
            end = most if device == stopped else len(row)
            while counts[device] < end and given.issuperset(needs(table, device, row[counts[device]])):
                given |= set(gives(table, device, row[counts[device]]))
                counts[device] += 1
    return [row[:count] for row, count in zip(table.rows, counts, strict=True)]


@given(tables)
def test_what_is_told_to_have_arrived_was_needed_before(table: Table) -> None:
    """Every message but those after the last answer; each once, and sent by the device that is told."""
    found, place = told(messages(table)), {}
    for device, row in enumerate(table.rows):
        for position, step in enumerate(row):
            place |= {("made", made): (device, position) for made in gives(table, device, step)}
            place |= {("needed", need): (device, position) for need in needs(table, device, step)}
    for message, arrived in found.items():
        sender, after = place["made", message]
        for one in arrived:
            assert place["needed", one][0] == sender
            assert place["needed", one][1] <= after
            assert place["made", one][0] == place["needed", message][0]
    assert len({one for arrived in found.values() for one in arrived}) == sum(map(len, found.values()))
    if table.name == "1f1b":  # activations are answered by gradients, gradients by later activations
        crossing = (table.stages - 1) * table.micro_batches
        assert sum(map(len, found.values())) == 2 * crossing - sum(range(2, table.stages + 1))
