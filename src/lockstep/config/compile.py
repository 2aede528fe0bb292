"""The section of the level compiler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.section import Section

Level = Literal["O0", "O1", "O2"]


class CompileConfig(Section):
    """The level compiler. A level changes speed and memory, never a bit (contract C3)."""

    level: Literal["auto", "O0", "O1", "O2"] = "auto"
    """`O0` runs operator by operator, `O1` compiles each kind of block once, `O2` makes the whole step one program
    over one static memory plan. `auto` is O2 for Lockstep's models, whose bits are the same at every level (one process
    whose programs are not cached yet takes its first step at O0, and compiles then if that pays; where passes are named
    or `explain` is set it compiles at once), and O0 for a module that is given to `Trainer`, which O1 and O2 give to
    `torch.compile`. Under `numerics: fast` a model always runs as
    O0."""
    disable_pass: list[str] = Field(default_factory=list)
    """Passes to leave out (`docs/compile-passes.md` names them)."""
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

    @property
    def wanted(self) -> bool:
        """Whether the user asked for what a level does: a run then compiles whether or not that pays."""
        return self.level != "auto" or self.explain or bool(self.disable_pass or self.only_pass)

    @property
    def of_model(self) -> Level:
        """The level of a Lockstep model."""
        return "O2" if self.level == "auto" else self.level

    @property
    def of_module(self) -> Level:
        """The level of any other `torch.nn.Module`: one that nobody named does not wait for Inductor, nor leave the
        numbers of its eager operators."""
        return "O0" if self.level == "auto" else self.level
