"""A saved configuration reloads identically: whatever values the schema allows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.config import Config, load_config, save_config
from lockstep.config.names import fields, sections
from lockstep.config.schema import DEFAULT_MODEL
from lockstep.config.strict_yaml import dump, parse
from lockstep.errors import LockstepError

LEAVES = {name: field.annotation for name, field in fields(Config) if not sections(field.annotation)}
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.floats(0.0, 1.0) | st.floats(allow_nan=False, allow_infinity=False)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a plain type; limits of single fields are left to the schema, which refuses what is outside."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return st.sampled_from(arguments)
    if get_origin(annotation) in (list, tuple):
        return st.lists(values(arguments[0]), max_size=3)
    plain = {
        bool: st.booleans(),
        int: st.integers(0, 9) | st.integers(),
        float: NUMBERS,
        str: TEXT,
        type(None): st.none(),
    }
    if annotation in plain:
        return plain[annotation]
    choices = [values(argument) for argument in arguments if isinstance(argument, type) or get_args(argument)]
    return st.one_of(choices)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A valid configuration with up to four values of its own. Sizes such as 2GiB are left as they are."""
    tree: dict[str, Any] = {"model": dict(DEFAULT_MODEL)}
    if draw(st.booleans()):
        tree["model"] = draw(TEXT)
    names = [name for name in LEAVES if not (name.startswith("model") and isinstance(tree["model"], str))]
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        *above, leaf = name.split(".")
        here = tree
        for part in above:
            here = here.setdefault(part, {})
        here[leaf] = draw(values(LEAVES[name]))
    try:
        return Config.model_validate(tree)
    except LockstepError:
        assume(False)
        raise


@settings(max_examples=50)
@given(configs())
def test_a_saved_configuration_reloads_identically(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        again = load_config(path)
        assert again == config
        save_config(again, Path(folder) / "again.yaml")
        assert path.read_bytes() == (Path(folder) / "again.yaml").read_bytes()


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
LOOKALIKES = st.sampled_from(
    [
        "1e-3",
        "yes",
        "off",
        "null",
        "~",
        "010",
        "1:30",
        "2024-01-01",
        "<<",
        "=",
        "",
        " ",
        "0x1F",
        "1_0",
        ".5",
        "a: b",
        "- a",
        "#",
    ]
)


@given(
    st.recursive(
        PLAIN | LOOKALIKES, lambda inner: st.lists(inner) | st.dictionaries(TEXT | LOOKALIKES, inner), max_leaves=8
    )
)
def test_what_is_dumped_parses_back_with_its_types(tree):
    again = parse(dump(tree), "text")
    assert again == tree
    assert repr(again) == repr(tree)  # tells 1 from 1.0 and from True
