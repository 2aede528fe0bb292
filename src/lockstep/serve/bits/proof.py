"""Run every path of a model and compare it with the training forward; where one differs, find where it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.compile import CannotCompile
from lockstep.config.model import ModelConfig
from lockstep.model import Model
from lockstep.serve.bits.levels import Levels
from lockstep.serve.bits.paths import Path, Pick, paths, run, training
from lockstep.serve.bits.trace import Place, Trace, differing, first_difference, traced
from lockstep.serve.engine import Engine
from lockstep.serve.params import SamplingParams

Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Proof:
    """One path: how many values were compared with the training forward's, how many differ, and where that starts.
    A path that is not possible for the model has compared none; its name says why."""

    path: str
    compared: int
    differ: int
    place: Place | None = None


class _Passes:
    """Counts the passes of a proof for `told`."""

    def __init__(self, told: Told, total: int) -> None:
        self._told, self._total, self._done = told, total, 0

    def one(self) -> None:
        """One more is done."""
        self.reach(self._done + 1)

    def reach(self, done: int) -> None:
        """So many are done, or were left out."""
        self._done = done
        self._told(done, self._total)


def prove(model: Model, sequences: Sequence[Sequence[int]], told: Told = lambda done, total: None) -> Iterator[Proof]:
    """Prove the contract on a model: every path for every sequence (token ids), logits as raw bytes; then the engine,
    on several processes too where the model's canonical_tp allows it.

    The sequences ride in each other's batches. Gives one Proof per path, as it is ready. told: called with the passes
    through the model that are done, and with all there will be.
    """
    model.decoder.prepare(model.ops, model.dtype)
    levels, degrees = Levels(model), engine_degrees(model.config)
    by_path = _paths(model, sequences)
    of_path = [sum(len(path.passes) for path in same) for same in by_path]
    done = 2 * len(sequences)
    passes = _Passes(told, done + sum(of_path) + len(degrees))
    expected = [run(levels, model.ops, training(s), passes.one) for s in sequences]
    yield _training_step(model, sequences, expected)
    passes.reach(done)
    for same, count in zip(by_path, of_path, strict=True):
        try:
            yield _prove_path(levels, same, sequences, expected, passes.one)
        except CannotCompile as error:
            yield Proof(f"{same[0].name}: not possible, {error}", 0, 0)
        done += count
        passes.reach(done)
    for tp in degrees:
        yield prove_engine(model, sequences, tp)
        passes.one()


def _paths(model: Model, sequences: Sequence[Sequence[int]]) -> list[tuple[Path, ...]]:
    """Every path, for each of the sequences."""
    of_each = [paths(s, [o for j, o in enumerate(sequences) if j != i]) for i, s in enumerate(sequences)]
    fast = model.ops.numerics == "fast"  # plain PyTorch is not compiled
    return [same for same in zip(*of_each, strict=True) if same[0].level == "O0" or not fast]


def _prove_path(
    levels: Levels,
    same: Sequence[Path],
    sequences: Sequence[Sequence[int]],
    expected: list[Tensor],
    passed: Callable[[], None],
) -> Proof:
    compared = differ = 0
    place = None
    for path, sequence, right in zip(same, sequences, expected, strict=True):
        wrong = differing(run(levels, levels.model.ops, path, passed), right)
        if wrong and place is None:
            place = _locate(levels, path, training(sequence))
        compared += right.numel()
        differ += wrong
    return Proof(same[0].name, compared, differ, place)


def _locate(levels: Levels, path: Path, reference: Path) -> Place | None:
    """Operators are seen at O0; what differs in a program alone, with the same operators, is the program."""
    one_by_one = replace(path, level="O0")
    place = first_difference(_recorded(levels, one_by_one), _recorded(levels, reference))
    return place or (None if path.level == "O0" else Place(f"program of {path.level}", "none by itself"))


def _recorded(levels: Levels, path: Path) -> list[tuple[Place, Tensor]]:
    """The outputs at every place, rows of the sequence under test only, joined over the passes."""
    with traced(levels.model.decoder, levels.model.ops) as (ops, trace):
        run(levels, ops, path)
    calls = len(trace.outputs) // len(path.passes)
    parts = [
        Trace(trace.outputs[i * calls : (i + 1) * calls]).rows(_picker(step.rows)) for i, step in enumerate(path.passes)
    ]
    return [(same[0][0], torch.cat([rows for _, rows in same])) for same in zip(*parts, strict=True)]


def _picker(rows: slice) -> Pick:
    return lambda output: output[rows]


def _training_step(model: Model, sequences: Sequence[Sequence[int]], expected: list[Tensor]) -> Proof:
    """The log-probabilities inside a real training step, gradients recorded, against those of the logits."""
    compared = differ = 0
    for sequence, logits in zip(sequences, expected, strict=True):
        if len(sequence) < 2:
            continue
        targets = torch.tensor([*sequence[1:], -1])
        step = training(sequence).passes[0]
        with torch.enable_grad():
            hidden = model.decoder(model.ops, torch.tensor(step.tokens), step.batch, dtype=model.dtype)
            weights = torch.ones(len(sequence))
            _, trained = model.ops.linear_cross_entropy(
                hidden, model.decoder.head_weight, targets, weights, softcap=model.decoder.logit_softcap
            )
        right = model.ops.select_logprobs(logits[:-1], targets[:-1])
        compared += len(right)
        differ += differing(trained[:-1], right)
    return Proof("training step, log-probabilities", compared, differ)


def engine_degrees(config: ModelConfig) -> list[int]:
    """The numbers of processes that the engine is run with: one, two and the most, where the model allows it."""
    return sorted({1, min(2, config.canonical_tp), config.canonical_tp})


def prove_engine(model: Model, sequences: Sequence[Sequence[int]], tp: int) -> Proof:
    """The engine itself: all sequences as prompts at once, its log-probabilities against `Model.logprobs`."""
    room = model.config.max_positions
    prompts = [list(s[: room - 8]) for s in sequences]
    engine = Engine(model, tp=tp, max_batch_tokens=128)
    told = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.8, seed=0, logprobs=0, ignore_eos=True))
    engine.close()
    compared = differ = 0
    for prompt, completion in zip(prompts, told, strict=True):
        right = model.logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 :]
        served = torch.tensor(completion.logprobs, dtype=torch.float32)
        compared += len(right)
        differ += differing(served, right)
    return Proof(f"engine{'' if tp == 1 else f' of {tp} processes'}, log-probabilities", compared, differ)
