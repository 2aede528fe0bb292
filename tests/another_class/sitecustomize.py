"""Makes a process one of another device class than the processor's: `pytest --device-class cpu-amx-bf16`.

Python imports a module of this name by itself where it finds one. So every process that a test starts, and what those
start, is of the class too: servers, their engines, ranks.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

BUILDS = {
    "cpu-amx-bf16": ("amx-bf16", "avx2-tiles", "plain-tiles"),
    "cpu-avx512-bf16": ("avx512-bf16", "avx2-pairs", "plain-pairs"),
}
"""Of each class its build, and what gives the same bits with AVX2 and with nothing."""
NAME = "LOCKSTEP_TESTED_CLASS"
"""Where processes that a test starts find the class."""
_BUILD = "lockstep.ops.build"


def take_over(name: str) -> None:
    """The class begins where `ops.build` is, or will be, imported: importing PyTorch here would cost every process."""
    os.environ[NAME] = name
    if _BUILD in sys.modules:
        _change(sys.modules[_BUILD])
    else:
        sys.meta_path.insert(0, _Changing())


class _Changing(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _BUILD:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def change_too(module: ModuleType) -> None:
            run(module)
            _change(module)

        spec.loader.exec_module = change_too  # type: ignore[method-assign]
        return spec


def _change(build: Any) -> None:
    import torch

    from lockstep.ops import device_class

    name = os.environ[NAME]
    best, real = build.best_isa(), torch.cpu.get_capabilities()
    own, with_avx2, plain = BUILDS[name]
    if best == own:
        return
    build._ISA[own] = build.EMULATED[plain if best == "plain" else with_avx2]
    tiles = dict.fromkeys(device_class._AMX_NEEDS, name == device_class.AMX_CLASS)
    torch.cpu.get_capabilities = lambda: real | tiles | dict.fromkeys(device_class._BF16_NEEDS, True)
    torch.backends.cpu.get_cpu_capability = lambda: "AVX512"
    torch.cpu._init_amx = lambda: True


if __name__ == "sitecustomize":
    take_over(os.environ[NAME])
