"""Makes a process one of device class `cpu-avx512-bf16` on a processor that is not: `pytest --pairs`.

Python imports a module of this name by itself where it finds one. So every process that a test starts, and what those
start, is of the class too: servers, their engines, ranks.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_BUILD = "lockstep.ops.build"


def take_over() -> None:
    """The class begins where `ops.build` is, or will be, imported: importing PyTorch here would cost every process."""
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

    best, real = build.best_isa(), torch.cpu.get_capabilities()
    if best == "avx512-bf16":
        return
    build._ISA["avx512-bf16"] = build.EMULATED["plain-pairs" if best == "plain" else "avx2-pairs"]
    torch.cpu.get_capabilities = lambda: real | dict.fromkeys(device_class._BF16_NEEDS, True)
    torch.backends.cpu.get_cpu_capability = lambda: "AVX512"


if __name__ == "sitecustomize":
    take_over()
