"""Step times of many layouts on the same processes: what a planner is calibrated with, and judged by.

The layouts are built once and take turns, a few steps each, so that whatever else this machine does meets all of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.config import Config, load_config, save_config
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.launch import launch
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import Transport

Sections = Mapping[str, Mapping[str, Any]]
"""Keys by section over a configuration: ``{"parallel": {"pp": 2}, "train": {"micro_batch": 4, "micro_batches": 2}}``"""


@dataclass(frozen=True)
class LayoutSteps:
    """What one layout took. seconds: of each step, slowest rank. peak_memory: resident bytes by rank, over all steps
    (of a process that holds every measured layout). sent_bytes: of a step, by axis, all ranks together."""

    sections: dict[str, dict[str, Any]]
    seconds: list[float]
    peak_memory: list[int]
    sent_bytes: dict[str, int]

    @property
    def step_s(self) -> float:
        """The median step."""
        return median(self.seconds)


def measure_layouts(
    config: Config, layouts: Sequence[Sections], rounds: int = 3, steps: int = 2, warm_up: int = 1
) -> list[LayoutSteps]:
    """Train each layout for ``rounds`` times ``steps`` steps, in turns, on processes that this starts and ends.

    All layouts must ask for the same number of processes (LockstepError). Nothing is saved.
    """
    sizes = {MeshShape.of(_with(config, layout).parallel).size for layout in layouts}
    if len(sizes) != 1:
        raise LockstepError(
            f"measure_layouts: the layouts ask for {sorted(sizes)} processes; give layouts of one number"
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-measure-") as name:
        folder = Path(name)
        tree = config.model_dump()
        tree["train"] |= {"out": str(folder / "run")}
        save_config(check(Config, tree, "measure_layouts"), folder / "config.yaml")
        job = {"layouts": layouts, "rounds": rounds, "steps": steps, "warm_up": warm_up}
        (folder / "job.json").write_text(json.dumps(job))
        code = launch([str(folder)], MeshShape(dp=sizes.pop()), module="lockstep.train.measure")
        if code != 0:
            raise LockstepError(f"measuring layouts failed with exit code {code}: its message is above")
        return [LayoutSteps(**found) for found in json.loads((folder / "found.json").read_text())]


def take_turns(
    config: Config, layouts: Sequence[Sections], transport: Transport, rounds: int, steps: int, warm_up: int
) -> list[LayoutSteps]:
    """One rank's part of it; every rank of the transport calls it alike and gets the same."""
    from lockstep.train.build import build

    runs = []
    for layout in layouts:
        asked = _with(config, layout)
        mesh = Mesh(MeshShape.of(asked.parallel), transport)
        out = Path(asked.train.out).expanduser()
        runs.append((asked, build(asked, None, out, lambda what, done, total: None, None, mesh, print)))
    seconds: list[list[float]] = [[] for _ in layouts]
    peaks: list[list[int]] = [[0] * transport.size for _ in layouts]
    sent: list[dict[str, int]] = [{} for _ in layouts]
    for number in range(rounds + (warm_up > 0)):
        for i, (asked, run) in enumerate(runs):
            for step in range(warm_up if warm_up and number == 0 else steps):
                took = _step(asked, run, step)
                report: dict[str, Any] = run.engine.report()
                if not warm_up or number > 0:
                    seconds[i].append(took)
                    peaks[i] = [max(a, b) for a, b in zip(peaks[i], report.get("peak_memory", peaks[i]), strict=True)]
                    sent[i] = report.get("sent_bytes", {})
    plain = [{name: dict(keys) for name, keys in layout.items()} for layout in layouts]
    return [LayoutSteps(*found) for found in zip(plain, seconds, peaks, sent, strict=True)]


def _step(config: Config, run: Any, step: int) -> float:
    """Seconds of a step, of the slowest rank, all having begun together."""
    import torch

    world = run.mesh.world
    world.gather(torch.zeros(1))
    began = time.perf_counter()
    batches = run.data.global_batch(step, config.train.micro_batch, config.train.micro_batches)
    found = run.engine.gradient(batches, config.train.z_loss, lambda: False)
    run.engine.norm(found)
    run.engine.update(found, config.optimizer.lr, 1.0)
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return max(float(each) for each in world.gather(took))


def _with(config: Config, sections: Sections) -> Config:
    tree = config.model_dump()
    for name, keys in sections.items():
        tree[name] = {**tree[name], **keys}
    return check(Config, tree, "measure_layouts")


def _rank(folder: Path) -> None:
    from lockstep.parallel.join import joined

    job, config = json.loads((folder / "job.json").read_text()), load_config(folder / "config.yaml")
    with joined(MeshShape.of(_with(config, job["layouts"][0]).parallel)) as mesh:
        found = take_turns(config, job["layouts"], mesh.transport, job["rounds"], job["steps"], job["warm_up"])
        if mesh.first:
            (folder / "found.json").write_text(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    try:
        _rank(Path(sys.argv[1]))
    except LockstepError as error:
        sys.exit(f"lockstep: {error}")
