"""Builds what a run needs: data, tokenizer, model, the parameters that train, their optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.compile.passes import pipeline
from lockstep.config import Config, ModelConfig
from lockstep.errors import LockstepError
from lockstep.model import Decoder, Model, Tokenizer, load, random_decoder
from lockstep.model.decoder import check_widths
from lockstep.model.families import FAMILIES, hf_names
from lockstep.model.families import check as check_family
from lockstep.model.hash import hash_tensors
from lockstep.model.hf_config import write_config
from lockstep.model.init import draw
from lockstep.model.lora import add_lora, has_lora, merge_lora, save_adapter
from lockstep.ops import operators
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.partition import Partition
from lockstep.parallel.rules import check_positions, with_segments
from lockstep.train.changes import same_corpus
from lockstep.train.checkpoint import Checkpoint
from lockstep.train.data import Batch, Dataset, Report, Tokens, dataset, open_tokens, scan, tokenised, trained_tokenizer
from lockstep.train.engine import Engine, OneProcess
from lockstep.train.flops import step_flops
from lockstep.train.layout import partition
from lockstep.train.memory import check_memory
from lockstep.train.mesh_engine import OnMesh
from lockstep.train.optimizer import AdamW
from lockstep.train.step import Compute


@dataclass(frozen=True)
class Run:
    """Everything that trains. base: hash of the frozen weights; None where all weights train.

    parameters: those that train on this process, float32, by name.

    model: what this process holds of it; shape: the whole decoder, on the meta device where this is a part.
    """

    model: Model
    shape: Decoder
    data: Dataset
    parameters: dict[str, nn.Parameter]
    mesh: Mesh
    engine: Engine
    base: str | None

    @property
    def compute(self) -> Compute:
        return Compute(self.model.ops, self.model.dtype)

    @property
    def vocabulary_segments(self) -> int:
        """In how many segments sums over the vocabulary are made."""
        return self.shape.config.canonical_tp

    @property
    def adapters_only(self) -> bool:
        return self.base is not None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def title(self) -> str:
        """Whose block the model is made of."""
        return self.shape.config.family

    @property
    def size(self) -> int:
        """Parameters of the whole model, frozen ones included."""
        return sum(p.numel() for p in self.shape.parameters())

    def flops(self, batches: list[Batch]) -> float:
        """Of a step."""
        return step_flops(self.shape, batches, self.adapters_only)

    def fixed(self) -> dict[str, Tensor]:
        """What no gradient trains in a whole model (the bias of an expert choice): its checkpoint holds that too.
        Adapters leave the frozen weights to the model they are of."""
        return {} if self.adapters_only else _untrained(self.model.decoder)

    def expected_fixed(self) -> dict[str, Tensor]:
        """The same of the whole model, which this process may hold a part of (values mean nothing)."""
        return {} if self.adapters_only else _untrained(self.shape)

    def weights_file(self, ours: list[str]) -> tuple[str, dict[str, str]]:
        """The weights' file stem in a checkpoint, and our names -> the names in it."""
        if self.adapters_only:
            return "adapters", {name: name for name in ours}
        return "model", hf_names(ours, FAMILIES[self.shape.config.family])

    def documents(self) -> dict[str, Any]:
        """What makes a checkpoint of a whole model a Hugging Face directory."""
        return {} if self.adapters_only else {"config": write_config(self.shape.config, "float32")}


def build(
    config: Config,
    given: Model | None,
    out: Path,
    report: Report,
    point: Checkpoint | None,
    mesh: Mesh,
    note: Callable[[str], None],
) -> Run:
    """Build a run. point: the checkpoint that will be restored into it, whose tokenizer and token file are taken
    without reading the corpus again. mesh: the ranks that train together; the first prepares the data for all.
    note: where one-line messages go.
    Raises `LockstepError` for what does not fit together.
    """
    start = given if given is not None else _loaded(config, point)
    shape = start.config if start is not None else config.model
    assert isinstance(shape, ModelConfig)
    shape = with_segments(config, shape)
    _check_shape(config, shape)
    part = partition(config, shape, mesh)
    ops = operators(config.train.numerics)  # before the corpus is read: there may be no compiler
    with mesh.first_alone():
        tokenizer, tokens = prepare_data(config, start, out / "data", report, point)
    _check_vocabulary(config, shape, tokenizer)
    data = dataset(tokens, config.data.seq_len, config.train.seed)
    if part is not None and not part.whole:
        decoder, base = _slice(part, config, start), None
    else:
        decoder = random_decoder(shape, config.train.seed) if start is None else start.decoder
        decoder.config = shape
        base = _prepare(decoder, config, adapters=config.lora.rank > 0)
    ops = ops if part is None else part.operators(ops)
    model = Model(decoder, tokenizer, ops, getattr(torch, config.train.dtype))
    trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad and not p.is_meta}
    if part is None:
        engine: Engine = OneProcess(model, trained, AdamW(trained, config.optimizer, ops), config, note)
    else:
        if part.whole:
            part.names = list(trained)  # adapters, where the rest is frozen
        engine = OnMesh(mesh, part, model, trained, config, note)
    return Run(model, decoder if part is None or part.whole else Decoder(shape), data, trained, mesh, engine, base)


def export(run: Run, config: Config, out: Path) -> Path:
    """Write ``<out>/export``: a Hugging Face directory, or adapters alone in PEFT's format (``lora.merge`` false)."""
    path, model = out / "export", run.engine.whole_model()
    if model is None:  # another rank writes it
        return path
    if run.adapters_only and not config.lora.merge:
        save_adapter(model.decoder, path, str(config.model), force=True)
    else:
        model.save(path, force=True)
    return path


def _loaded(config: Config, point: Checkpoint | None) -> Model | None:
    """The model that ``config.model`` names, or None if it describes a new one. Frozen weights stay in the compute
    dtype (every use rounds to it anyway); masters are read in float32."""
    if isinstance(config.model, ModelConfig):
        return None
    if point is not None and config.lora.rank == 0 and (point.path / "config.json").exists():
        # All weights are in the checkpoint: the model that the run began with need not be there any more.
        return load(point.path, dtype="float32", numerics="fast")
    model = load(config.model, dtype=config.train.dtype if config.lora.rank else "float32", numerics="fast")
    if has_lora(model.decoder) and config.lora.rank and not config.lora.merge:
        raise LockstepError(
            f"lora.merge: false writes adapters on {config.model}, which is an adapter itself: merge that one first "
            f"(lockstep export {config.model} DIR) and set model to DIR"
        )
    return model


def _prepare(decoder: Decoder, config: Config, adapters: bool) -> str | None:
    """Give the decoder float32 masters of its own, or frozen weights and adapters. Returns the frozen weights' hash."""
    decoder.train()
    merge_lora(decoder)  # an adapter that was loaded is part of the weights that this run begins with
    if adapters:
        decoder.requires_grad_(False)
        base = hash_tensors(sorted(decoder.named_parameters()))
        add_lora(decoder, config.lora.rank, config.lora.alpha, config.lora.targets, config.train.seed)
        return base
    for name, parameter in list(decoder.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        # A copy: a loaded weight may be a view of the mapped file.
        own = parameter.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(own, requires_grad=parameter.requires_grad))
    return None


def _slice(part: Partition, config: Config, start: Model | None) -> Decoder:
    """This rank's float32 masters: slices of the loaded weights, or drawn by seed."""
    if start is None:
        seed = config.train.seed
        return part.decoder(lambda name, shape: draw(name, shape, part.config, seed)).train()
    merge_lora(start.decoder)
    whole = dict(start.decoder.named_parameters())
    return part.decoder(lambda name, shape: whole[name]).train()


def _untrained(decoder: Decoder) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in decoder.named_parameters() if not p.requires_grad}


def prepare_data(
    config: Config, start: Model | None, cache: Path, report: Report, point: Checkpoint | None
) -> tuple[Tokenizer, Tokens]:
    """The tokenizer and the token file of a run; start: the loaded model that it begins with."""
    if point is not None and same_corpus(point.config(), config.model_dump(mode="json")):
        tokens = open_tokens(cache, point.document("state")["data"])
        if tokens is not None:
            return Tokenizer.from_dir(point.path), tokens
    corpus = scan(config.data, report)
    tokenizer = _tokenizer(config, start, point)
    if tokenizer is None:
        assert isinstance(config.model, ModelConfig)
        tokenizer = trained_tokenizer(corpus, config.model.vocab_size, cache, report)
    return tokenizer, tokenised(corpus, tokenizer, cache, report)


def _tokenizer(config: Config, start: Model | None, point: Checkpoint | None) -> Tokenizer | None:
    """The tokenizer that is given, or the one the checkpoint's weights were trained with; None: one must be trained."""
    if config.data.tokenizer is not None:
        path = Path(config.data.tokenizer).expanduser()
        if not path.is_dir():
            raise LockstepError(f"data.tokenizer: {path} is no directory: give one that holds tokenizer.json")
        return Tokenizer.from_dir(path)
    if start is not None:
        return start.tokenizer
    return None if point is None else Tokenizer.from_dir(point.path)


def _check_shape(config: Config, shape: ModelConfig) -> None:
    """What can be refused before the corpus is read."""
    new, how = isinstance(config.model, ModelConfig), config.compile
    pipeline(how.of_model, how.disable_pass, how.only_pass)
    if how.only_pass and config.train.numerics == "fast":
        raise LockstepError(
            f"compile.only_pass: {', '.join(how.only_pass)} does not run under train.numerics fast, where operators "
            "run one by one. Set train.numerics to bitwise, or leave compile.only_pass out."
        )
    check_positions(config, shape)
    if config.lora.rank and not config.lora.merge and new:
        raise LockstepError(
            "lora.merge: false writes adapters that name the model they belong to, and a new one has no name: "
            "set model to a path or an alias, or lora.merge to true"
        )
    if config.train.numerics == "bitwise":
        check_widths(shape)
    check_family(shape)
    check_memory(shape, config.lora.rank > 0, config.parallel)


def _check_vocabulary(config: Config, shape: ModelConfig, tokenizer: Tokenizer) -> None:
    own = isinstance(config.model, str) and config.data.tokenizer is None  # the loaded model's: `load` has checked it
    if not own and tokenizer.vocab_size > shape.vocab_size:
        raise LockstepError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the embedding only {shape.vocab_size} rows "
            f"(model.vocab_size): set model.vocab_size to at least {tokenizer.vocab_size}"
        )
