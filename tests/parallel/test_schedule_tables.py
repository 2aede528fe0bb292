"""Tables as values: text, files, differences, the check, and the messages that they imply."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parallel.schedules import (
    NAMES,
    ScheduleError,
    Step,
    Table,
    check,
    load_table,
    messages,
    schedule,
    table_from_dict,
    walk,
)
from lockstep.parallel.schedules.dependencies import needs

any_table = st.builds(schedule, st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9))


def table(*rows: str, micro_batches: int = 1, chunks: int = 1, placement: str = "loop") -> Table:
    head = {"name": "mine", "stages": len(rows), "micro_batches": micro_batches, "chunks": chunks}
    return table_from_dict(head | {"placement": placement, "rows": list(rows)})


@settings(max_examples=60, deadline=None)
@given(any_table)
def test_every_step_once_and_in_order(made):
    check(made)
    order = list(walk(made))
    for device, row in enumerate(made.rows):
        assert tuple(step for d, step in order if d == device) == row
    done = set()
    for device, step in order:
        assert all(need in done for need in needs(made, device, step))
        done |= {(p.kind == "F", p.micro_batch, made.group(device, p.chunk)) for p in step.parts if p.kind != "W"}


@settings(max_examples=60, deadline=None)
@given(any_table)
def test_messages_are_received_as_they_are_sent(made):
    count = 0
    for (sender, receiver), channel in messages(made).items():
        assert abs(sender - receiver) == 1 or {sender, receiver} == {0, made.stages - 1}
        assert [m.after for m in channel] == sorted(m.after for m in channel)
        count += len(channel)
    crossing = sum(made.holder(g)[0] != made.holder(g + 1)[0] for g in range(made.groups - 1))
    assert count == 2 * crossing * made.micro_batches


@settings(max_examples=20, deadline=None)
@given(any_table)
def test_text_and_back(made):
    assert table_from_dict(made.to_dict()) == made


@pytest.mark.parametrize("name", ["table.yaml", "table.json"])
def test_files(tmp_path, name):
    made = schedule("dualpipe-v", 3, 7)
    made.save(tmp_path / name)
    assert load_table(tmp_path / name) == made
    assert "F0 F1 F2 F3 F4 F0.1 B0.1" in (tmp_path / name).read_text()


def test_printed():
    assert str(schedule("1f1b", 2, 2)) == (
        "1f1b: 2 devices x 1 chunks, 2 micro-batches\n0: F0 F1 BW0 BW1\n1: F0 BW0 F1 BW1"
    )
    assert str(Step("F", 3, 1, Step("BW", 1))) == "F3.1&BW1"


def test_compared():
    one, other = schedule("1f1b", 2, 3), schedule("gpipe", 2, 3)
    assert one != other
    assert one == schedule("1f1b", 2, 3)
    assert one.differences(one) == []
    said = "\n".join(one.differences(other))
    assert "name: 1f1b / gpipe" in said
    assert "device 1, steps" in said


def test_v_placement_turns_round():
    made = schedule("zb-v", 3, 5)
    assert [made.holder(g) for g in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert [made.group(*made.holder(g)) for g in range(6)] == list(range(6))
    made = schedule("interleaved", 3, 3)
    assert [made.holder(g) for g in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["F0", "F0 B0 W0"], "device 0 never does B0, W0"),
        (["F0 F0 BW0", "F0 BW0"], "device 0 does F0 twice, as steps 0 and 1"),
        (["F0 BW0 W0", "F0 BW0"], "does W0 twice"),
        (["B0 F0 W0", "F0 BW0"], "must be F, then B, then W"),
        (["F0 BW0", "F0 W0 B0"], "must be F, then B, then W"),
        (["F0 BW0 F1 BW1", "F0 BW0"], "has the step F1, but there are 1 micro-batches"),
        (["F0 BW0", "F0 BW0.1"], "has the step BW0.1"),
    ],
)
def test_wrong_rows(rows, said):
    with pytest.raises(ScheduleError, match=said):
        check(table(*rows))


def test_deadlock_names_the_circle():
    stuck = table("F0 BW0 F1 BW1", "F0 F1 BW0 BW1", micro_batches=2)
    with pytest.raises(ScheduleError) as error:
        check(stuck)
    text = str(error.value)
    assert "device 0 stands before BW0 and waits for B0 of device 1" in text
    assert "device 1 stands before F1 and waits for F1 of device 0" in text


def test_deadlock_of_a_device_with_itself():
    stuck = table("F0 F0.1 BW0.1 BW0", "F0.1 F0 BW0.1 BW0", chunks=2, placement="v")
    with pytest.raises(ScheduleError, match=r"device 1 stands before F0.1 and waits for F0 of device 1"):
        check(stuck)


def test_pairs_are_a_forward_with_a_full_backward():
    with pytest.raises(ScheduleError, match="only a forward with a full backward"):
        check(table("F0 F1&B0 W0 BW1", micro_batches=2))
    check(table("F0 F1&BW0 BW1", micro_batches=2))


def test_unreadable_files(tmp_path):
    made = schedule("1f1b", 2, 2).to_dict()
    with pytest.raises(ScheduleError, match="'X0' is not a step"):
        table_from_dict(made | {"rows": ["X0", "F0"]})
    with pytest.raises(ScheduleError, match="'stages' is None; expected int"):
        table_from_dict({k: v for k, v in made.items() if k != "stages"})
    with pytest.raises(ScheduleError, match="use one of loop, v"):
        table_from_dict(made | {"placement": "spiral"})
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ScheduleError, match=r"list\.yaml: expected a mapping"):
        load_table(tmp_path / "list.yaml")


def test_wrong_requests():
    with pytest.raises(ScheduleError, match="did you mean 'zb-h1'"):
        schedule("zb_h1", 2, 2)
    with pytest.raises(ScheduleError, match="micro_batches is 0; give a whole number of at least 1"):
        schedule("1f1b", 2, 0)
    with pytest.raises(ScheduleError, match="chunks is 3; it must be 2"):
        schedule("zb-v", 2, 2, chunks=3)
    with pytest.raises(ScheduleError, match="holds 4 micro-batches of activations on device 0; activation_cap is 3"):
        schedule("1f1b", 4, 8, activation_cap=3)
    with pytest.raises(ScheduleError, match="too small"):
        schedule("zb-1p", 4, 8, activation_cap=0.5)
    with pytest.raises(ScheduleError, match="give one, or 4"):
        schedule("zb-2p", 4, 8, activation_cap=[4, 4])


def test_cap_per_device():
    made = schedule("zb-1p", 4, 12, activation_cap=[4, 3, 2, 1])
    held = [max(sum((s.kind == "F") - (s.kind == "B") for s in row[:i]) for i in range(len(row))) for row in made.rows]
    assert all(h <= cap for h, cap in zip(held, [4, 3, 2, 1], strict=True))


@pytest.mark.parametrize("content", [b"\x8a\xff", b"{"])
def test_a_file_that_is_no_table(content, tmp_path):
    (tmp_path / "table.yaml").write_bytes(content)
    with pytest.raises(ScheduleError, match="cannot be read as YAML or JSON"):
        load_table(tmp_path / "table.yaml")


@pytest.mark.parametrize("cap", [float("nan"), 0, -1])
def test_a_cap_that_is_none(cap):
    with pytest.raises(ScheduleError, match=f"activation_cap is {cap}; give a finite number above 0"):
        schedule("zb-1p", 4, 8, activation_cap=cap)
