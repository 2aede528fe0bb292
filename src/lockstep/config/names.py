"""The dotted names of a configuration, read off its sections, and the nearest one to a wrong name."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from lockstep.config.section import Section

_NEAR = 0.6
"""The least similarity (difflib's ratio) at which a name is offered."""


OTHERWISE = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "grad_clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_batches",
    "max_steps": "train.steps",
    "output_dir": "train.out",
    "max_seq_len": "data.seq_len",
    "max_length": "data.seq_len",
    "warmup": "schedule.warmup_steps",
    "n_layers": "model.num_layers",
}
"""Other tools' names of our keys, which no likeness of letters would find."""


def fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field below a section in order, parents before children, by dotted name."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for part in sections(field.annotation):
            yield from fields(part, f"{prefix}{name}.")


def sections(annotation: Any) -> list[type[Section]]:
    """The sections that a field of this type may hold (none for a plain value)."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for argument in get_args(annotation) for found in sections(argument)]


def plain_types(annotation: Any) -> set[type]:
    """The types at the leaves of a union or an annotated type: `int | None` -> {int, NoneType}."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return {kind for argument in get_args(annotation) for kind in plain_types(argument)}
    return {annotation} if isinstance(annotation, type) else set()


def nearest(key: str, names: list[str]) -> tuple[str, bool]:
    """The name most like `key` (by the whole dotted name or by the last part alone), and whether it is alike."""
    usual = OTHERWISE.get(key.rpartition(".")[2])
    if usual in names:
        return usual, True

    def likeness(name: str) -> float:
        whole = SequenceMatcher(None, key, name).ratio()
        leaf = SequenceMatcher(None, key.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        # The same leaf in another section must not tie with the same leaf in the right one.
        return max(whole, leaf) + 0.01 * whole

    best = max(names, key=likeness)
    return best, likeness(best) >= _NEAR
