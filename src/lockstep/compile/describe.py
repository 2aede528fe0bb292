"""What a module is, as a plain value: two modules described alike compute the same function of their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.compile.capture import CannotCompile
from lockstep.compile.own_code import OwnCode, described, own_code
from lockstep.model.linear import WeightCache
from lockstep.ops.called import called

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def describe(module: nn.Module) -> dict[str, Any]:
    """The module's class, its plain attributes, its parameters' shapes, and the same of every module in it.

    Attributes that are other objects are described by what they hold if they are dataclasses, else by their class. What
    is the caller's own code is in it as `OwnCode`.
    """
    return _described(module, {})


def _described(module: nn.Module, own: dict[type, list[OwnCode]]) -> dict[str, Any]:
    """own: the caller's code in classes that were met already."""
    attributes = {k: _plain(v) for k, v in sorted(_own(module))}
    parameters = {k: _tensor(p) for k, p in module._parameters.items()}
    buffers = {k: _tensor(b) for k, b in module._buffers.items()}
    modules = {k: None if m is None else _described(m, own) for k, m in module._modules.items()}
    kind = type(module)
    if kind not in own:
        own[kind] = own_code(kind)
    named = {"class": f"{kind.__module__}.{kind.__qualname__}", "own": own[kind]}
    return {**named, **attributes, "parameters": parameters, "buffers": buffers, "modules": modules}


class Unchanged:
    """Notices when a module is no longer what it was: an attribute, a weight's memory, a submodule, a class's code.

    It looks at the objects themselves, not at a description of them, so that asking costs little. hooks: a hook that is
    there now counts as a change too. memory: so does other memory of a weight.
    """

    def __init__(self, module: nn.Module, hooks: bool = True, memory: bool = True) -> None:
        self._hooks = Hooks(module) if hooks else None
        self._seen = [(owner, name, value) for owner, name, value in _held(module)]
        tensors = [t for _, _, t in self._seen if isinstance(t, Tensor)]
        self._memory = [(t, t.data_ptr() if memory else None, t.requires_grad) for t in tensors]
        self._kinds = [(part, type(part)) for part in module.modules()]
        self._code = {kind: own_code(kind) for kind in {kind for _, kind in self._kinds}}
        self._sizes = [(owner, len(owner)) for owner in {id(o): o for o, _, _ in self._seen}.values()]

    def __bool__(self) -> bool:
        for owner, name, value in self._seen:
            now = owner.get(name, _GONE)
            if now is not value and (isinstance(value, (Tensor, nn.Module)) or now != value):
                return False
        if self._hooks or any(type(part) is not kind for part, kind in self._kinds):
            return False
        if any(own_code(kind) != code for kind, code in self._code.items()):
            return False
        return all(len(owner) == count for owner, count in self._sizes) and all(
            pointer in (None, t.data_ptr()) and t.requires_grad == wanted for t, pointer, wanted in self._memory
        )


class Hooks:
    """Whether a part or a parameter of a module has a hook, or all modules have. A program calls none, so a debugger's
    would see nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [getattr(part, name) for part in module.modules() for name in _HOOKS]
        self._tables += [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]
        self._parameters = list(module.parameters())

    def __bool__(self) -> bool:
        return any(self._tables) or any(
            p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters
        )


class SameWeights:
    """Notices when a parameter was written in place or has other memory. Cheap enough to ask at every token: it looks
    at no object of Python. That a parameter is another one `Unchanged` notices."""

    def __init__(self, module: nn.Module) -> None:
        self._same = called().lockstep_watch_same
        self._watch = torch.classes.lockstep.Watch(list(module.parameters()))
        self._address = int(self._watch.address())

    def __bool__(self) -> bool:
        return bool(self._same(self._address))


_GONE = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refuse_watched(module: nn.Module) -> None:
    """Raise CannotCompile where somebody looks at operators one by one, or has changed what lies around the blocks."""
    refuse_hooks(module)
    if torch.is_anomaly_enabled():
        raise CannotCompile("autograd's anomaly detection is on, which looks at operators one by one")
    if own_code(type(module)) or any(map(callable, dict(_own(module)).values())):
        raise CannotCompile(
            f"{type(module).__qualname__} has code of its own, and programs are made of its blocks alone"
        )


def refuse_hooks(module: nn.Module) -> None:
    """Raise CannotCompile where a module has hooks."""
    if Hooks(module):
        raise CannotCompile("the model has hooks, which programs do not call")


def shell(module: nn.Module) -> nn.Module:
    """A copy without weights: its parameters lie on the meta device, its weight caches are empty."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values()]:
            if tensor is not None:
                hollow = tensor.detach().to("meta")
                memo[id(tensor)] = Parameter(hollow, tensor.requires_grad) if isinstance(tensor, Parameter) else hollow
        for value in vars(part).values():
            if isinstance(value, WeightCache):
                memo[id(value)] = WeightCache()
    return copy.deepcopy(module, memo)


def packable(module: nn.Module) -> dict[str, dict[str, WeightCache]]:
    """The parts whose `weight` can be laid out for inference, by name, and where they keep it, by attribute."""
    return {name: caches for name, part in module.named_modules() if (caches := caches_of(part))}


def caches_of(part: nn.Module) -> dict[str, WeightCache]:
    """Where a part keeps its weight as it is laid out for inference, by attribute."""
    return {name: value for name, value in vars(part).items() if isinstance(value, WeightCache)}


def _held(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for part in module.modules():
        own = vars(part)
        yield from ((own, k, v) for k, v in _own(part))
        for table in (part._parameters, part._buffers, part._modules):
            yield from ((table, k, v) for k, v in table.items())


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that the module's author gave it, without weights laid out for inference."""
    found = [(k, v) for k, v in vars(module).items() if k[0] != "_" and k != "training"]
    return [(k, v) for k, v in found if not isinstance(v, WeightCache)]


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value if not isinstance(value, torch.dtype) else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Tensor):
        return _tensor(value)
    return described(value)


def _tensor(value: Tensor | None) -> list[Any] | None:
    return None if value is None else [list(value.shape), str(value.dtype), value.requires_grad]
