"""The section of the level compiler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.section import Section


class CompileConfig(Section):
    """The level compiler. A level changes speed and memory, never a bit (contract C3)."""

    level: Literal["O0", "O1", "O2"] = "O0"
    """`O0` runs operator by operator, `O1` compiles each kind of block once, `O2` makes the whole step one program
    over one static memory plan. Under `numerics: fast` a model always runs as O0, and a module that is given to
    `Trainer` by `torch.compile`."""
    disable_pass: list[str] = Field(default_factory=list)
    """Passes to leave out (`docs/compile.md` names them)."""
    only_pass: list[str] = Field(default_factory=list)
    """The only passes to run; empty: all of the level."""
    cache: bool = True
    """Keep compiled programs on disk and take them from there; `lockstep cache` lists them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What a block's backward pass computes again instead of keeping it: nothing, what costs little (norms, gates,
    rotations), or everything. Less memory, more time, the same bits."""
    explain: bool = False
    """Print what the compiler did and how long it took, and write the graphs to `<out>/compile.html`. The cache is
    not read then: what comes from it was compiled before."""
