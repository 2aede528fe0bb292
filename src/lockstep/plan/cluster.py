"""Clusters: what a device can do and how devices are linked, read from a YAML description with sources.

A description is a file of ``plan/clusters/`` or the user's own; ``64xH100`` is 64 devices of the first kind.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.given import instance, number, whole
from lockstep.plan.topology import Topology
from lockstep.plan.typed import known_keys, typed
from lockstep.plan.yaml_file import read_yaml

_LIBRARY = Path(__file__).with_name("clusters")
_KEYS = ("name", "aliases", "devices", "device", "levels", "sources", "uncertainty")
_GIVEN = re.compile(r"\s*(\d+)\s*[xX*]\s*(.+?)\s*")
_NO_COUNT = re.compile(r"\s*[-+.,\d]*\s*(?:[xX*](?![\w-]*\.ya?ml$)|$)")
"""A number that is no count, nothing, or no device behind it."""
_MOST_DEVICES = 1 << 24
_SLOWEST, _FASTEST = 1e-9, 1e12
"""Rates, sizes and times that a description may give, in its own units: products of them stay numbers."""
_DIGITS = 4000
"""Of a count that are read: a number of more is beyond the most devices all the same, and Python reads none so long."""


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are those of the data sheet; efficiencies say what real kernels reach.

    ``cores``: how many matrix tiles run at once (streaming multiprocessors), for the loss of a half-empty last wave.
    ``matrix_efficiency``: fraction of the matrix rate that a large product reaches; ``half_k``: the inner dimension
    at which half of that is reached. ``memory_efficiency``: fraction of the bandwidth that elementwise kernels reach.
    ``launch_us``: time of the host per kernel, which bounds small layers. ``host_gb_s``: copies to host memory, one
    direction, while the other direction is as busy. ``host_memory_gb``: host memory that one device may fill.
    ``copies_hide``: whether those copies run beside the computation (an accelerator's copy engine), or are made by the
    cores that compute.
    """

    name: str
    matrix_tflops: dict[str, float]
    memory_gb: float
    memory_gb_s: float
    cores: int
    matrix_efficiency: float
    half_k: float
    memory_efficiency: float
    launch_us: float
    host_gb_s: float
    host_memory_gb: float
    copies_hide: bool = True

    @property
    def capacity(self) -> float:
        """Bytes that a plan may fill: vendors' GB of device memory are GiB, of which the driver keeps about 2 %.
        As much is left for what closed forms miss."""
        return self.memory_gb * 2**30 * 0.96


@dataclass(frozen=True)
class Level:
    """One level of the interconnect, from the inside out.

    ``size``: devices that reach one another at this level (the outermost holds everything). ``gb_s``: bus bandwidth
    of one device in one direction as collectives reach it (nccl-tests' busbw). ``latency_us`` per call, ``hop_us``
    per further rank. ``topology``: ``switch`` where any two reach one another at the whole bandwidth, ``mesh`` where
    every two have a link of their own, ``ring`` where each has links to its two neighbours (`lockstep.plan.topology`).
    """

    name: str
    size: int
    gb_s: float
    latency_us: float
    hop_us: float
    topology: Topology = "switch"


@dataclass(frozen=True)
class Cluster:
    """``devices`` of one kind and the levels that join them.

    ``uncertainty``: how many times further than usual calibration may move from the description.
    """

    name: str
    devices: int
    device: Device
    levels: tuple[Level, ...]
    sources: tuple[str, ...] = ()
    uncertainty: float = 1.0

    def with_level(self, name: str, **changes: Any) -> Cluster:
        """The same cluster with numbers of one level changed, such as ``with_level("network", gb_s=12.5)``."""
        if name not in (names := [level.name for level in self.levels]):
            raise LockstepError(f"cluster {self.name} has no level {name!r}: its levels are {', '.join(names)}.")
        return replace(self, levels=tuple(replace(v, **changes) if v.name == name else v for v in self.levels))

    @property
    def node(self) -> int:
        """Devices of the innermost level."""
        return self.levels[0].size


def cluster_of(given: str | Path | Cluster) -> Cluster:
    """A cluster as a caller gave it: itself, or what `load_cluster` takes."""
    if isinstance(given, (Cluster, str, Path)):
        return given if isinstance(given, Cluster) else load_cluster(given)
    raise LockstepError(f"cluster is {given!r:.60}; give a text such as 8xH100, a YAML file, or a Cluster.")


def load_cluster(given: str | Path) -> Cluster:
    """A cluster from ``64xH100``, ``64xpath/to/mine.yaml`` or a YAML file that states ``devices``.

    Raises LockstepError for a device that no description knows (with the nearest name) and for a bad description.
    """
    if _NO_COUNT.match(str(given)) and not _GIVEN.fullmatch(str(given)):
        raise LockstepError(f"cluster {str(given)!r}: expected a whole number of devices and their name, as in 8xH100.")
    match = _GIVEN.fullmatch(str(given))
    count, kind = (int(match[1][:_DIGITS]), match[2]) if match else (None, str(given).strip())
    if count == 0:
        raise LockstepError(f"cluster {str(given)!r} has no devices: write at least 1x{kind}.")
    if count is not None and count > _MOST_DEVICES:
        raise LockstepError(f"cluster {str(given)!r:.60}: the planner counts up to {_MOST_DEVICES:,} devices.")
    description = _read(kind)
    devices = count if count is not None else description.get("devices")
    if devices is None:
        raise LockstepError(f"cluster {str(given)!r} does not say how many devices: write for example 8x{kind}.")
    return _build(description, whole(devices, f"cluster {str(given)!r}: devices", most=_MOST_DEVICES), kind)


def cluster_names() -> list[str]:
    """The names of the packaged descriptions."""
    return sorted(file.stem for file in _LIBRARY.glob("*.yaml"))


def _read(kind: str) -> dict[str, Any]:
    if kind.endswith((".yaml", ".yml")):
        path = Path(kind)
        if not os.path.exists(path):  # False for a name that no file can have, too
            raise LockstepError(f"cluster file {kind:.200} does not exist: give a YAML file or one of {_known()}.")
        return _parse(path)
    names = _names()
    found = names.get(kind.lower())
    if found is None:
        within = sorted((name for name in names if name in kind.lower()), key=len)  # as in NVIDIA-H100-SXM
        near = within[-1:] or get_close_matches(kind.lower(), list(names), n=1, cutoff=0.0)
        nearest = _parse(_LIBRARY / f"{names[near[0]]}.yaml")["name"] if near else ""
        raise LockstepError(
            f"unknown device {kind!r:.60}: the nearest name is {nearest!r}. Known are {_known()}; "
            f"any other device can be described in a YAML file: copy one of {_LIBRARY} and give its path, as in "
            "8xmine.yaml."
        )
    return _parse(_LIBRARY / f"{found}.yaml")


def _known() -> str:
    return ", ".join(cluster_names())


@cache
def _names() -> dict[str, str]:
    """Lower-case name or alias to file stem."""
    table = {}
    for stem in cluster_names():
        description = _parse(_LIBRARY / f"{stem}.yaml")
        for name in (stem, description["name"], *description.get("aliases", [])):
            table[str(name).lower()] = stem
    return table


def _parse(path: Path) -> dict[str, Any]:
    content = read_yaml(path, "cluster file")
    if not isinstance(content, dict):
        raise LockstepError(f"cluster file {path} must be a mapping with name, device and levels.")
    return content


def _build(description: dict[str, Any], devices: int, kind: str) -> Cluster:
    where = f"cluster description {kind!r}"
    known_keys(description, _KEYS, where)
    if missing := [name for name in ("name", "device", "levels") if name not in description]:
        raise LockstepError(f"{where} has no {missing[0]}; it is needed.")
    if not isinstance(description["name"], str):
        raise LockstepError(f"{where}: name is {description['name']!r:.60}, expected text.")
    given = description["device"]
    named = {**given, "name": description["name"]} if isinstance(given, dict) else given
    device = typed(Device, named, f"{where}: device")
    given = instance(description["levels"], list, f"{where}: levels")
    levels = tuple(typed(Level, level, f"{where}: level {i}") for i, level in enumerate(given))
    names = [level.name for level in levels]
    if twice := [name for name in names if names.count(name) > 1]:
        raise LockstepError(f"{where}: two levels are called {twice[0]!r}; name each once.")
    _check_device(device, where)
    number(description.get("uncertainty", 1.0), f"{where}: uncertainty", above=True)
    for level in levels:
        whole(level.size, f"{where}: size of level {level.name}", most=_MOST_DEVICES)
        number(level.gb_s, f"{where}: gb_s of level {level.name}", _SLOWEST, _FASTEST)
        for name in ("latency_us", "hop_us"):
            number(getattr(level, name), f"{where}: {name} of level {level.name}", most=_FASTEST)
    if not levels or any(b.size < a.size for a, b in pairwise(levels)):
        raise LockstepError(f"{where}: levels must be listed from the inside out, sizes growing.")
    words = {key: instance(description.get(key, []), list, f"{where}: {key}") for key in ("aliases", "sources")}
    for key, listed in words.items():
        for word in listed:
            instance(word, str, f"{where}: an entry of {key}")
    uncertainty = float(description.get("uncertainty", 1.0))
    return Cluster(f"{devices}x{device.name}", devices, device, levels, tuple(words["sources"]), uncertainty)


def _check_device(device: Device, where: str) -> None:
    """Raise LockstepError for a number that no device has."""
    if device.matrix_tflops == {}:
        raise LockstepError(f"{where}: matrix_tflops is empty: give a rate for each dtype, as in {{bf16: 989}}.")
    for name, rate in instance(device.matrix_tflops, dict, f"{where}: matrix_tflops").items():
        number(rate, f"{where}: matrix_tflops {name}", _SLOWEST, _FASTEST)
    for name in ("memory_gb", "memory_gb_s", "cores", "host_gb_s"):
        number(getattr(device, name), f"{where}: {name}", _SLOWEST, _FASTEST)
    instance(device.copies_hide, bool, f"{where}: copies_hide")
    for name in ("matrix_efficiency", "memory_efficiency"):
        number(getattr(device, name), f"{where}: {name}, a fraction of the rate,", above=True, most=1.0)
    for name in ("half_k", "launch_us", "host_memory_gb"):
        number(getattr(device, name), f"{where}: {name}", most=_FASTEST)
