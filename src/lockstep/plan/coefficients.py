"""The coefficients that calibration may move: how far reality is from the description of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.given import instance, number, whole
from lockstep.plan.columns import Column, Columns
from lockstep.plan.typed import is_version, known_keys
from lockstep.plan.yaml_file import read_yaml, write_yaml

Key = tuple[int, ...]
_VERSION = 1
"""Of the file."""


def _factor(spread: float, on: str) -> float:
    """spread, on: as in `PRIOR` and `FACTOR_ON`."""
    found: float = field(default=1.0, metadata={"spread": spread, "on": on})
    return found


@dataclass(frozen=True)
class Coefficients:
    """Factors on described quantities: 1 is "as described". Calibration fits them, each with a log-normal prior.

    ``layer``: measured over predicted time of one layer, for layer shapes that were measured (``layer_key``); a
    shape that was not has 1.
    """

    matrix: float = _factor(0.1, "the efficiency of matrix products")
    half_k: float = _factor(0.7, "the inner dimension at which a product is half as fast")
    memory: float = _factor(0.2, "the bandwidth that elementwise kernels reach")
    launch: float = _factor(0.3, "the host's time per kernel")
    latency: float = _factor(0.4, "the latency of a collective call")
    hop: float = _factor(0.4, "the latency per rank of a ring")
    node_bandwidth: float = _factor(0.15, "the bandwidth inside a node")
    network_bandwidth: float = _factor(0.3, "the bandwidth of the levels above")
    gradient: float = _factor(0.4, "the bytes of the gradient reduction")
    optimizer: float = _factor(0.5, "the memory traffic of the optimizer step")
    head: float = _factor(0.7, "the memory traffic of logits and loss")
    micro_batch: float = _factor(1.0, "the host's time per micro-batch")
    step: float = _factor(1.0, "the host's time per step")
    transfer_latency: float = _factor(1.0, "the latency between pipeline stages")
    transfer_bandwidth: float = _factor(0.7, "the bandwidth between pipeline stages")
    layer: Mapping[Key, float] = field(default_factory=dict)

    def factors(self) -> dict[str, float]:
        """The physical factors by name, without those of layer shapes."""
        return {name: float(getattr(self, name)) for name in FITTED}

    def layer_factor(self, rows: Columns) -> Column:
        """The factor on the layer time of every row, shape ``[rows]``."""
        if not self.layer:
            return np.ones(len(rows))
        return np.array([self.layer.get(key, 1.0) for key in layer_keys(rows)])


PRIOR: dict[str, float] = {each.name: each.metadata["spread"] for each in fields(Coefficients) if each.metadata}
"""Standard deviation of the logarithm of each factor: how far from the description it may plausibly be."""

FACTOR_ON: dict[str, str] = {each.name: each.metadata["on"] for each in fields(Coefficients) if each.metadata}
"""The described quantity that each factor multiplies."""

FITTED = tuple(PRIOR)


def from_logs(logs: Column, layer: Mapping[Key, float] | None = None, spread: float = 1.0) -> Coefficients:
    """Coefficients from values in standard deviations of the prior (times ``spread``), in the order of ``FITTED``."""
    values = {name: float(np.exp(spread * PRIOR[name] * z)) for name, z in zip(FITTED, logs, strict=True)}
    return replace(Coefficients(), **values, layer=dict(layer or {}))


def layer_keys(rows: Columns) -> list[Key]:
    """What decides the time of one layer on one rank: its sizes, the tokens, the split and the recompute."""
    parts = [getattr(rows, name) for name in _SHAPE]
    return [tuple(int(value) for value in row) for row in zip(*parts, strict=True)]


_SHAPE = (
    "hidden", "heads", "intermediate", "experts", "seq", "micro_batch", "tp", "cp", "ep", "recompute",
    "recompute_layers",
)  # fmt: skip
"""The numbers of a layer shape's key, in their order."""


def checked(factors: Coefficients | None) -> Coefficients:
    """Coefficients that a caller gave (None: as described). Raises LockstepError for factors that are none."""
    found = Coefficients() if factors is None else instance(factors, Coefficients, "coefficients")
    for name in FITTED:
        number(getattr(found, name), f"coefficients: {name}", above=True)
    for key, value in instance(found.layer, Mapping, "coefficients: layer").items():
        _check_shape(instance(key, tuple, "coefficients: layer"), "coefficients: layer")
        number(value, f"coefficients: layer {key}", above=True)
    return found


def _check_shape(key: Sequence[Any], what: str) -> Key:
    """The key of a layer shape. Raises LockstepError for one of another length, or of what are no sizes."""
    if len(key) != len(_SHAPE):
        raise LockstepError(f"{what} is {list(key)!r:.60}; give {len(_SHAPE)} numbers: {', '.join(_SHAPE)}.")
    return tuple(whole(size, f"{what}: {name}", least=0) for name, size in zip(_SHAPE, key, strict=True))


def save_coefficients(factors: Coefficients, path: str | Path) -> None:
    """Write a YAML file that ``load_coefficients`` reads."""
    layers = [{"shape": list(key), "factor": value} for key, value in factors.layer.items()]
    content = {"coefficients": _VERSION, "factors": factors.factors(), "layers": layers}
    write_yaml(path, content)


def load_coefficients(path: str | Path) -> Coefficients:
    """Read what ``save_coefficients`` wrote. Raises LockstepError for any other file."""
    what = f"coefficients file {path}"
    content = known_keys(read_yaml(path, "coefficients file"), ("coefficients", "factors", "layers"), what)
    if not is_version(content.get("coefficients"), _VERSION):
        raise LockstepError(
            f"{what}: expected `coefficients: {_VERSION}` in it; `lockstep plan calibrate STEPS.yaml` writes one."
        )
    given = known_keys(content.get("factors"), FITTED, f"{what}: factors")
    factors = {name: number(value, f"{what}: factors.{name}", above=True) for name, value in given.items()}
    layers = instance(content.get("layers"), list, f"{what}: layers")
    shapes = dict(_layer(layer, f"{what}: layers, number {i}") for i, layer in enumerate(layers))
    return Coefficients(**factors, layer=shapes)


def _layer(given: Any, what: str) -> tuple[Key, float]:
    """A layer shape and its factor."""
    layer = known_keys(given, ("shape", "factor"), what)
    key = _check_shape(instance(layer.get("shape"), list, f"{what}: shape"), f"{what}: shape")
    return key, number(layer.get("factor"), f"{what}: factor", above=True)
