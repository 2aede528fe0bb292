"""The first rank's side of a model that several processes serve: it tells the others what to join in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.model import Decoder, Model, PackedCache
from lockstep.model.lora import has_lora
from lockstep.ops import Numerics, Paged, operators
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.join import meet
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import PeerLost
from lockstep.serve.launch import Launched, launch_ranks, share_of_cores
from lockstep.serve.runner import Level, Runner, name_of
from lockstep.serve.tp.divide import fitted
from lockstep.serve.tp.fit import ServedPart, load_part, partition
from lockstep.serve.tp.messages import Join, Pages
from lockstep.serve.tp.orders import Lead
from lockstep.serve.tp.processes import Processes
from lockstep.serve.tp.share import share_of
from lockstep.serve.weights import check_weights, give_weights, put_weights, replace_weights


class Group:
    """The ranks of one served model, this process being the first. `close` ends the others, as does its own end.

    model: the first rank's part. whole: the model in memory that was shared out, if it was.
    """

    def __init__(self, processes: Processes, part: ServedPart, model: Model, whole: Model | None = None) -> None:
        """processes: set up and loaded, each on its own rank of the part's mesh."""
        self.part, self.model, self.whole = part, model, whole
        self.processes = processes
        self._lead = Lead(part.mesh["tp"])

    @staticmethod
    def load(
        path: str, tp: int, dtype: str, numerics: Numerics, ranks: Sequence[Launched] = (),
        packed: PackedCache | None = None,
    ) -> Group:  # fmt: skip
        """Of a model on disk: every rank reads its own slices from the mapped files, or from the cache."""
        kept = None if packed is None else (str(packed.directory), packed.limit, packed.small)
        with _starting(tp, ranks) as processes:
            processes.tell(Join(0, tp, str(processes.meeting), path, None, {}, dtype, numerics, kept))
            mesh = _meet(processes, tp)
            model, part = load_part(path, mesh, dtype, numerics, packed)
            processes.hear()
            processes.have_met()
            return Group(processes, part, model)

    @staticmethod
    def share(model: Model, tp: int) -> Group:
        """Of a model in memory: the others are sent their slices. `update_weights` changes the model, too."""
        numerics = model.ops.numerics
        config = fitted(model.config, tp, numerics)
        if has_lora(model.decoder):
            raise LockstepError(
                f"tp is {tp}: adapters are not cut across processes: merge them with `lockstep export`."
            )
        state = dict(model.decoder.named_parameters())
        with _starting(tp) as processes:
            dtypes = {name: name_of(parameter.dtype) for name, parameter in state.items()}
            whole = config.model_dump(mode="json")
            processes.tell(Join(0, tp, str(processes.meeting), None, whole, dtypes, name_of(model.dtype), numerics))
            part = partition(config, _meet(processes, tp), numerics)
            decoder = Decoder(part.local)
            give_weights(decoder, {name: part.take(name, tensor.detach()) for name, tensor in state.items()})
            own = Model(decoder.eval(), None, part.operators(operators(numerics)), model.dtype)
            group = Group(processes, part, own, model)
            group._send(state)
            processes.hear()
            processes.have_met()
            return group

    @property
    def tp(self) -> int:
        return self.part.mesh.shape.tp

    def runner(self, pages: int, dtype: torch.dtype, rows: int, level: Level) -> Runner:
        """What runs passes on all ranks, each with so many pages for its heads; see `Runner`."""
        self.processes.tell(Pages(pages, name_of(dtype), rows, level))
        runner = Runner(self.model, pages, dtype, rows, level, share_of(self.model, self.part), self.passing)
        self.processes.hear()
        return runner

    @contextmanager
    def passing(self, tokens: Tensor, batch: Paged, rows: Tensor) -> Iterator[None]:
        """A pass that the others join in; the first rank's own goes within. Raises RanksLost where one has ended."""
        with self._in_step():
            self._lead.tell_pass(tokens, batch, rows)
            yield

    def update_weights(self, state: Mapping[str, Tensor]) -> None:
        """Other weights for every rank. Raises LockstepError, having changed nothing, where they do not fit."""
        check_weights(Decoder(self.part.config), state)
        if self.whole is not None:
            replace_weights(self.whole, state)
        self._send(state)
        put_weights(self.model.decoder, {name: self.part.take(name, tensor) for name, tensor in state.items()})

    def close(self) -> None:
        """End the other ranks, and wait until they have ended."""
        self.processes.close()

    def _send(self, state: Mapping[str, Tensor]) -> None:
        own = dict(self.model.decoder.named_parameters())
        with self._in_step():
            self._lead.tell_weights(own, lambda rank, name: self.part.slice_of(rank, name, state[name]))

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """What breaks within leaves the ranks at different places: they are ended."""
        if not self.processes.close.alive:
            raise self.processes.lost()
        try:
            yield
        except PeerLost:
            lost = self.processes.lost()
            self.close()
            raise lost from None
        except BaseException:
            self.close()
            raise


@contextmanager
def _starting(tp: int, ranks: Sequence[Launched] = ()) -> Iterator[Processes]:
    """The other ranks' processes, which end where what is within fails."""
    torch.set_num_threads(min(torch.get_num_threads(), share_of_cores(tp) or 1))
    processes = Processes(ranks or launch_ranks(tp))
    try:
        yield processes
    except BaseException:
        processes.close()
        raise


def _meet(processes: Processes, tp: int) -> Mesh:
    processes.hear()
    return meet(MeshShape(tp=tp), 0, processes.meeting)
