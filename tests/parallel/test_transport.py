"""Messages between processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.transport import ProcessTransport


def test_a_message_is_waited_for_once() -> None:
    """Gloo takes a second wait for one on a second message, and it never ends."""
    waits: list[str] = []

    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
            return SimpleNamespace(wait=lambda: waits.append("sent"))

    pending = ProcessTransport(Group()).send(torch.ones(2), 1)
    pending.wait()
    pending.wait()
    assert waits == ["sent"]
