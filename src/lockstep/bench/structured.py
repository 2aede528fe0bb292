"""What structured output costs: a decoding step with a mask for every sequence, beside one without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.bench.decoding import decoding_step
from lockstep.bench.machine import Machine
from lockstep.bench.report import Report
from lockstep.bench.turns import Spread, ratios, take_turns

if TYPE_CHECKING:
    from lockstep.model import Model
    from lockstep.serve import Engine

_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {}}},
    "required": ["name", "age", "tags"],
}
_SCHEMA = {"type": "array", "items": _PERSON, "minItems": 1000}
"""Never complete within the tokens that are drawn."""
_PROMPT = 16


def structured(
    model: Model, clients: Sequence[int], tokens: int, rounds: int, machine: Machine, command: str
) -> Report:
    """Greedy steps of so many sequences on one engine, with and without a JSON schema, in turn."""
    from lockstep.serve import Engine

    engine = Engine(model, prefix_cache=False, max_running=max(clients))
    rows: list[tuple[str, ...]] = []
    data: dict[str, Any] = {}
    for count in clients:
        sides = {name: partial(_step, engine, count, tokens, name == "schema") for name in ("plain", "schema")}
        found = take_turns(sides, rounds)
        ratio = ratios(found["plain"], found["schema"])
        cells = [f"{1e3 * Spread.of(found[name]).median:.2f}" for name in sides]
        rows.append((f"{count}", *cells, f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"))
        data[str(count)] = {**found, "ratio": ratio.median}
    note = f"{tokens} tokens a sequence after a prompt of {_PROMPT}; the masks are computed beside the forward pass."
    columns = ("sequences", "ms a step, plain", "with a JSON schema", "schema / plain")
    return Report("structured", "Structured output", command, machine, columns, tuple(rows), (note,), data)


def _step(engine: Engine, clients: int, tokens: int, schema: bool) -> float:
    """Mean seconds of a step in which every sequence gets one token."""
    from lockstep.serve import SamplingParams, StructuredOutputs

    structure = StructuredOutputs(json=_SCHEMA) if schema else None
    params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True, structured_outputs=structure)
    prompts = [[(7 + 31 * client + 13 * i) % 256 for i in range(_PROMPT)] for client in range(clients)]
    return decoding_step(engine, prompts, params)
