"""The repeated blocks of any module, and a way to run them compiled: each kind of block is compiled once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def repeated(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that stand beside others of their class in a `ModuleList` or `Sequential`, and are made of
    modules themselves: the layers of a transformer, not the linear layers in it."""
    found, inside = list[nn.Module](), set[int]()
    for part in module.modules():
        if id(part) in inside or not isinstance(part, (nn.ModuleList, nn.Sequential)):
            continue
        classes = Counter(type(child) for child in part)
        blocks = [child for child in part if classes[type(child)] > 1 and any(True for _ in child.children())]
        found += blocks
        inside.update(id(inner) for block in blocks for inner in block.modules())
    return found


class Compiled:
    """Blocks with their forwards compiled by `torch.compile`. Blocks alike share what is compiled: Dynamo keeps it by
    the code of `forward`, and takes a block's parameters as inputs."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self._forwards: list[Callable[..., Any]] = [torch.compile(one.forward, dynamic=False) for one in blocks]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, calling a block runs it compiled. The backward pass belongs inside: what is recomputed in it must be
        what ran forward."""
        before = [vars(block).get("forward") for block in self.blocks]
        for block, forward in zip(self.blocks, self._forwards, strict=True):
            block.forward = forward
        try:
            yield
        finally:
            for block, own in zip(self.blocks, before, strict=True):
                if own is None:
                    del block.forward
                else:
                    block.forward = own
