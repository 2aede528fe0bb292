"""Lowering: a part of a captured graph to a recipe, at the number of rows that it was captured with.

Every value lies in some storage (`memory.effects.storage`): an input, an output, or an intermediate that will have a
place in the arena. Views cost nothing: a call names the storage and how it sees it. An operator with an `out` form
writes where its result belongs; one without writes a tensor of its own, which is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from lockstep.compile.recipe import ITEMSIZE, Call, NotAffine, Place, Recipe, Scratch, View, Workspace
from lockstep.memory.effects import Storage, is_collective, is_view, is_wait, storage, written

aten = torch.ops.aten

_COPIES = {aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default}
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_LARGEST = 1 << 16
"""Bytes of a constant that a recipe holds."""
_FULL = {"full", "full_like", "new_full", "ones", "ones_like", "new_ones"}


def lower(
    nodes: Sequence[Node], inputs: Sequence[Storage], results: Sequence[Node | None], loose: Set[Storage] = frozenset()
) -> Recipe:
    """The recipe that runs these nodes (in order) on given inputs and leaves the results in outputs.

    inputs: the storages that exist before: placeholders, or what another part of the graph computed.
    loose: those whose shape is not known. Raises NotAffine for what a recipe cannot hold.
    """
    work = _Lowering(inputs, loose)
    work.choose_outputs(nodes, results)
    for node in nodes:
        work.node(node)
    work.copy_results()
    return work.recipe(results)


@dataclass
class _Local:
    """An intermediate storage: its bytes and the calls that touch it."""

    size: int
    first: int
    last: int


@dataclass
class _Lowering:
    inputs: Sequence[Storage]
    loose: Set[Storage]
    places: dict[Storage, int] = field(default_factory=dict)
    """Storages that lie in an input or an output: its slot."""
    outputs: list[Node] = field(default_factory=list)
    """For every output the node whose shape it has."""
    copied: list[tuple[int, Node]] = field(default_factory=list)
    """Results that need a copy into their output: its slot, and the result."""
    locals: dict[Storage, _Local] = field(default_factory=dict)
    views: dict[tuple[Any, ...], int] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    workspaces: list[tuple[Storage, int, int, str]] = field(default_factory=list)
    """Results that nobody reads: storage, view, call, operator."""

    def __post_init__(self) -> None:
        self.places = {one: slot for slot, one in enumerate(self.inputs)}

    def choose_outputs(self, nodes: Sequence[Node], results: Sequence[Node | None]) -> None:
        """A storage that is a result as a whole is computed in its output's memory; other results are copied there."""
        computed = set(nodes)
        for node in results:
            if node is None:
                continue
            slot, where = len(self.inputs) + len(self.outputs), storage(node)
            self.outputs.append(node)
            if where in self.places or where[0] not in computed or not _is_whole(node, where):
                self.copied.append((slot, node))
            else:
                self.places[where] = slot

    def node(self, node: Node) -> None:
        """The calls of one node: none for views, tuple elements and empty tensors."""
        if node.op == "get_attr":
            return self._constant_tensor(node)
        if node.op != "call_function" or node.target is operator.getitem:
            return None
        target = node.target
        if is_wait(node) and isinstance(target, OpOverload):
            return self._wait(node, target)
        if is_view(node):
            return None
        if not isinstance(target, OpOverload):
            raise NotAffine(f"{node.name} calls {target}, which is no operator")
        kind = target.overloadpacket.__name__ if target.namespace == "aten" else ""
        if kind in _EMPTY:
            return None
        if kind in _ZEROS:
            return self._call("aten::zero_", [self._tensor(node)])
        if kind in _FULL:
            value = 1 if "ones" in kind else _named(node, "fill_value")
            return self._call("aten::fill_.Scalar", [self._tensor(node), self._constant(value)])
        if target in _COPIES:
            return self._copy(self._tensor(node), self._tensor(node.args[0]))
        if target is aten.index.Tensor:
            return self._select(node)
        return self._operator(node, target)

    def copy_results(self) -> None:
        for slot, node in self.copied:
            self._copy(self._view(slot, node), self._tensor(node))

    def recipe(self, results: Sequence[Node | None]) -> Recipe:
        """The finished recipe, its slots renumbered: places, buffers, views, constants."""
        places = len(self.inputs) + len(self.outputs)
        local_slots = {where: places + i for i, where in enumerate(self.locals)}
        first_view = places + len(local_slots)
        first_constant = first_view + len(self.views)

        def slot(kind_and_index: int) -> int:
            kind, index = divmod(kind_and_index, _KIND)
            return (first_constant if kind == _CONSTANT else first_view) + index

        views = tuple(
            View(
                base if isinstance(base, int) else local_slots[base], dtype, (offset, 0), _plain(sizes), _plain(strides)
            )
            for base, dtype, offset, sizes, strides in self.views
        )
        given = iter(range(len(self.outputs)))
        constants = tuple(_resolved(text, slot) for text in self.constants)
        calls = tuple(Call(c.operator, tuple(map(slot, c.arguments)), tuple(map(slot, c.results))) for c in self.calls)
        return Recipe(
            inputs=tuple(_place(where[0].name, _value(where)) for where in self.inputs),
            outputs=tuple(_place(node.name, _meta(node)) for node in self.outputs),
            scratch=tuple(Scratch((one.size, 0), one.first, one.last) for one in self.locals.values()),
            views=views,
            constants=constants,
            calls=calls,
            gives=tuple(None if node is None else next(given) for node in results),
            workspaces=tuple(
                Workspace(list(self.locals).index(where), view, call, name, where[1])
                for where, view, call, name in self.workspaces
            ),
        )

    def _operator(self, node: Node, target: OpOverload) -> None:
        schema, arguments = target._schema, self._arguments(node, target)
        if written(node) or not schema.returns:
            return self._call(_name(target), arguments)
        outs = self._results(node, len(schema.returns))
        form = out_form(target)
        if form is None and is_collective(node):
            raise NotAffine(f"{node.name} is a collective that cannot write into given memory")
        if form is None:
            return self._call(_name(target), arguments, outs)
        names = [a.name for a in form._schema.arguments]
        places = dict(zip([a.name for a in schema.arguments], arguments, strict=True))
        rest = iter(outs)
        return self._call(_name(form), [places[n] if n in places else next(rest) for n in names])

    def _arguments(self, node: Node, target: OpOverload) -> list[int]:
        """The slots of an operator's arguments."""
        given = [(_argument(node, i, a), a) for i, a in enumerate(target._schema.arguments)]
        named = is_collective(node)  # a group's name is another one in every process
        return [
            self._text(f"g{value}") if named and a.name == "group" else self._value(value, str(a.type))
            for value, a in given
        ]

    def _wait(self, node: Node, target: OpOverload) -> None:
        """Wait for a collective, whose result lies in its place then; what it sends is read until then."""
        sent = [self._tensor(source) for source in storage(node)[0].all_input_nodes]
        self._call(_name(target), self._arguments(node, target), reads=sent)

    def _results(self, node: Node, count: int) -> list[int]:
        """The views that an operator's results are written through."""
        if isinstance(node.meta["val"], list) and count == 1:  # one result, a list of tensors
            parts = [self._result(node, i, value) for i, value in enumerate(node.meta["val"])]
            return [self._text("t" + ",".join(map(str, parts)))]
        if count == 1 and isinstance(node.meta["val"], Tensor):
            return [self._tensor(node)]
        return [self._result(node, i, value) for i, value in enumerate(node.meta["val"][:count])]

    def _result(self, node: Node, index: int, value: Tensor) -> int:
        where = (node, index)
        if value.dtype != torch.uint8 or any(user.args[1] == index for user in node.users):
            return self._view_of(where, value)
        # Memory to work in. Its size at these rows means nothing.
        self.locals[where] = _Local(0, len(self.calls), len(self.calls))
        slot = self._see(where, value.new_empty(0), 0)
        assert isinstance(node.target, OpOverload)
        self.workspaces.append((where, slot % _KIND, len(self.calls), _name(node.target)))
        return slot

    def _select(self, node: Node) -> None:
        """`x[index]` for one index over the first dimension."""
        source, indices = node.args[0], node.args[1]
        if not isinstance(indices, (list, tuple)) or len(indices) != 1 or _meta(indices[0]).dim() != 1:
            raise NotAffine(f"{node.name}: only x[index] with one index of one dimension")
        arguments = [self._tensor(source), self._constant(0), self._tensor(indices[0]), self._tensor(node)]
        self._call("aten::index_select.out", arguments)

    def _constant_tensor(self, node: Node) -> None:
        """One number in every place is filled in (their number may grow with the rows); others stand in the recipe."""
        held = getattr(node.graph.owning_module, str(node.target))
        if not isinstance(held, Tensor) or held.numel() == 0:
            raise NotAffine(f"{node.name} is a constant of {getattr(held, 'shape', type(held))}")
        raw = held.contiguous().view(-1).view(torch.uint8).view(held.numel(), -1)
        if bool((raw == raw[0]).all()):
            return self._call("aten::fill_.Scalar", [self._tensor(node), self._constant(held.view(-1)[0].item())])
        if raw.numel() > _LARGEST:
            raise NotAffine(f"{node.name} is a constant of {raw.numel()} bytes")
        sizes = ",".join(map(str, held.shape))
        constant = self._text(f"v{_dtype(held)}:{sizes}:{bytes(raw.flatten().tolist()).hex()}")
        return self._copy(self._tensor(node), constant)

    def _copy(self, target: int, source: int) -> None:
        self._call("aten::copy_", [target, source, self._constant(False)])

    def _call(self, name: str, arguments: list[int], results: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        """One call. reads: what else must still be there when it is made."""
        at = len(self.calls)
        bases = list(self.views)
        for argument in self._members([*arguments, *results, *reads]):
            if argument // _KIND == _VIEW:
                base = bases[argument % _KIND][0]
                if not isinstance(base, int):
                    self.locals[base].last = at
        self.calls.append(Call(name, tuple(arguments), tuple(results)))

    def _members(self, slots: Sequence[int]) -> list[int]:
        """These slots, and the members of those that are lists."""
        texts = list(self.constants)
        lists = [texts[s % _KIND] for s in slots if s // _KIND == _CONSTANT and texts[s % _KIND][:1] == "t"]
        return [*slots, *(int(part) for text in lists for part in text[1:].split(",") if part)]

    def _value(self, value: Any, kind: str) -> int:
        if isinstance(value, Node):
            return self._tensor(value)
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, Node) for item in value):
            return self._text("t" + ",".join(str(self._tensor(item)) for item in value))
        if isinstance(value, (int, float)) and kind in ("Tensor", "Optional[Tensor]"):
            return self._text(f"w{_constant_text(value)}")
        return self._constant(value)

    def _constant(self, value: Any) -> int:
        return self._text(_constant_text(value))

    def _text(self, text: str) -> int:
        return _CONSTANT * _KIND + self.constants.setdefault(text, len(self.constants))

    def _tensor(self, node: Any) -> int:
        if not isinstance(node, Node):
            raise NotAffine(f"expected a tensor, got {node!r}")
        return self._view_of(storage(node), _meta(node))

    def _view_of(self, where: Storage, value: Tensor) -> int:
        base: Any = self.places.get(where)
        if where in self.loose and value.shape != _value(where).shape:
            raise NotAffine(f"a view of {where[0].name}, whose size is not known")
        if base is None:
            base = where
            if where not in self.locals:
                root = _value(where)
                size = ITEMSIZE[_dtype(root)] * _extent(root)
                self.locals[where] = _Local(size, len(self.calls), len(self.calls))
        return self._see(base, value, int(value.storage_offset() - _value(where).storage_offset()))

    def _view(self, slot: int, node: Node) -> int:
        value = _meta(node)
        return self._see(slot, torch.empty_like(value, memory_format=torch.contiguous_format), 0)

    def _see(self, base: Any, value: Tensor, offset: int) -> int:
        dtype = _dtype(value)
        key = (base, dtype, offset * ITEMSIZE[dtype], tuple(map(int, value.shape)), tuple(map(int, value.stride())))
        return _VIEW * _KIND + self.views.setdefault(key, len(self.views))


_VIEW, _CONSTANT, _KIND = 0, 1, 1 << 32
"""While lowering, a slot is its kind times `_KIND` plus its index."""


@cache
def out_form(target: OpOverload) -> OpOverload | None:
    """The overload that writes into given tensors: the same arguments and one `out` for every result."""
    mine = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        outs = [a for a in other._schema.arguments if a.is_out]
        theirs = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if theirs == mine and outs and len(outs) == len(target._schema.returns):
            return other
    return None


def _argument(node: Node, position: int, argument: Any) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(argument.name, argument.default_value)


def _named(node: Node, name: str) -> Any:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return next(_argument(node, i, a) for i, a in enumerate(arguments) if a.name == name)


def _name(target: OpOverload) -> str:
    overload = target._overloadname
    return target._schema.name if overload in ("", "default") else f"{target._schema.name}.{overload}"


def _constant_text(value: Any) -> str:
    if value is None or value == torch.device("cpu") or value == torch.strided:
        return "n"  # programs run on the CPU, on strided tensors: what an operator takes when it is not told
    if isinstance(value, bool):
        return f"b{int(value)}"
    if isinstance(value, int):
        return f"i{value}"
    if isinstance(value, float):
        return f"f{value.hex()}"
    if isinstance(value, torch.dtype):
        return f"d{str(value).removeprefix('torch.')}"
    if isinstance(value, str):
        return f"s{value}"
    if isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
        return "l" + ",".join(map(str, value))
    raise NotAffine(f"an argument of {value!r}")


def _resolved(text: str, slot: Any) -> str:
    if text[:1] != "t":
        return text
    return "t" + ",".join(str(slot(int(part))) for part in text[1:].split(","))


def _meta(node: Any) -> Tensor:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        raise NotAffine(f"{node} is no tensor but {value!r}")
    return value


def _value(where: Storage) -> Tensor:
    value = where[0].meta["val"]
    found = value if isinstance(value, Tensor) else value[where[1]]
    if not isinstance(found, Tensor):
        raise NotAffine(f"{where[0].name} is no tensor but {found!r}")
    return found


def _extent(value: Tensor) -> int:
    """Elements from the first to the last of a tensor's memory."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def _is_whole(node: Node, where: Storage) -> bool:
    """Whether a node is its storage as a whole, in order: then the storage can lie in the output itself."""
    value, root = _meta(node), _value(where)
    return (
        value.is_contiguous() and root.is_contiguous() and value.numel() == root.numel() and value.dtype == root.dtype
    )


def _place(name: str, value: Tensor) -> Place:
    return Place(name, _dtype(value), _plain(tuple(map(int, value.shape))))


def _plain(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((size, 0) for size in sizes)


def _dtype(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise NotAffine(f"a tensor of {value.dtype}")
    return name
