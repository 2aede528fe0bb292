"""What a stage is compiled to: the recipe of its forward pass and that of its backward pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.compile.recipe import Recipe, merge, recipe_from


@dataclass(frozen=True)
class Halves:
    """forward: the stage's inputs -> its results, then `saved` tensors. backward: the inputs that are `used` (by their
    index), the saved tensors, the gradients of the results in `tangents` -> the gradients of the differentiated inputs.

    weights: where gradients of weights come later (`Stage.early`), they are not the backward's, which instead leaves
    `carried` tensors behind its gradients: the used inputs, the saved tensors, the carried ones -> those gradients.
    """

    forward: Recipe
    backward: Recipe | None = None
    saved: int = 0
    used: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    weights: Recipe | None = None
    carried: int = 0

    def at_any(self, rows: int, other: Halves, more: int) -> Halves:
        """The recipes for every number of rows, from these for `rows` and others for `more`."""
        mine = (self.saved, self.used, self.tangents, self.carried)
        theirs = (other.saved, other.used, other.tangents, other.carried)
        assert mine == theirs, f"what is kept for the backward pass depends on the rows: {mine}, {theirs}"

        def both(a: Recipe | None, b: Recipe | None) -> Recipe | None:
            return None if a is None or b is None else merge(a, rows, b, more)

        return Halves(
            merge(self.forward, rows, other.forward, more),
            both(self.backward, other.backward),
            self.saved,
            self.used,
            self.tangents,
            both(self.weights, other.weights),
            self.carried,
        )

    def tree(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def halves_from(tree: dict[str, Any]) -> Halves:
    """Back from plain values; ValueError, KeyError or TypeError if they are none."""
    return Halves(
        recipe_from(tree["forward"]),
        None if tree["backward"] is None else recipe_from(tree["backward"]),
        int(tree["saved"]),
        tuple(map(int, tree["used"])),
        tuple(map(int, tree["tangents"])),
        None if tree["weights"] is None else recipe_from(tree["weights"]),
        int(tree["carried"]),
    )
