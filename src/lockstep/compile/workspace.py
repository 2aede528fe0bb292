"""Memory that operators work in: its size at a number of rows, from the operator itself on meta tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lockstep.compile.recipe import Recipe, Workspace, at


def sized(recipe: Recipe, rows: int) -> Recipe:
    """The recipe with workspaces that suffice for up to so many rows (an operator never needs less with more)."""
    scratch, views = list(recipe.scratch), list(recipe.views)
    for one in recipe.workspaces:
        size = (_bytes(recipe, one, rows), 0)
        scratch[one.scratch] = replace(scratch[one.scratch], size=size)
        views[one.view] = replace(views[one.view], sizes=(size,))
    return replace(recipe, scratch=tuple(scratch), views=tuple(views))


def _bytes(recipe: Recipe, one: Workspace, rows: int) -> int:
    namespace, name = one.operator.split("::")
    operator = getattr(getattr(torch.ops, namespace), name).default
    slots = recipe.calls[one.call].arguments[: len(operator._schema.arguments)]
    return int(operator(*(_argument(recipe, slot, rows) for slot in slots))[one.result].numel())


def _argument(recipe: Recipe, slot: int, rows: int) -> Any:
    """A slot as a meta tensor or a plain value."""
    first = len(recipe.inputs) + len(recipe.outputs) + len(recipe.scratch)
    if slot < first + len(recipe.views):
        view = recipe.views[slot - first]
        sizes, strides = ([at(size, rows) for size in pairs] for pairs in (view.sizes, view.strides))
        return torch.empty_strided(sizes, strides, dtype=getattr(torch, view.dtype), device="meta")
    kind, text = (constant := recipe.constants[slot - first - len(recipe.views)])[0], constant[1:]
    if kind in ("a", "m"):
        parts = [int(part) for part in text.split(",")]
        members = [at(pair, rows) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return members[0] if kind == "a" else members
    readers = {
        "n": lambda: None, "b": lambda: text == "1", "i": lambda: int(text), "f": lambda: float.fromhex(text),
        "d": lambda: getattr(torch, text), "s": lambda: text, "g": lambda: text,
        "l": lambda: [int(part) for part in text.split(",")],
    }  # fmt: skip
    return readers[kind]()
