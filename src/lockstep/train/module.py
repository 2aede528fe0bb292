"""A run of any `torch.nn.Module`: what must hold of the module and of the configuration, and the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config import CompileConfig, Config, ModelConfig
from lockstep.config.schema import DEFAULT_MODEL
from lockstep.errors import LockstepError
from lockstep.model import Model, Tokenizer
from lockstep.ops.contiguous import not_contiguous
from lockstep.parallel.collectives import Mesh
from lockstep.train.build import Run, prepare_data
from lockstep.train.checkpoint import Checkpoint
from lockstep.train.data import Batch, Dataset, Report, dataset
from lockstep.train.module_engine import OnModule, evaluating, logits_of


@dataclass(frozen=True)
class ModuleRun:
    """Everything that trains, as `Run` has it. forward_flops: of one token in a full row, matrix products and attention
    as PyTorch counts them."""

    module: nn.Module
    tokenizer: Tokenizer
    data: Dataset
    parameters: dict[str, nn.Parameter]
    mesh: Mesh
    engine: OnModule
    forward_flops: float
    base: None = None
    vocabulary_segments: int = 1
    adapters_only: bool = False

    @property
    def title(self) -> str:
        """The module's class."""
        return title(self.module)

    @property
    def size(self) -> int:
        """Parameters, frozen ones included."""
        return sum(p.numel() for p in self.module.parameters())

    def flops(self, batches: list[Batch]) -> float:
        """Of a step: backward is twice the forward, as where everything trains."""
        return 3.0 * self.forward_flops * sum(len(b.tokens) for b in batches)

    def fixed(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the trained parameters: frozen ones, persistent buffers; shared ones once."""
        seen, found = {id(p) for p in self.parameters.values()}, {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor.detach()
        return found

    def expected_fixed(self) -> dict[str, Tensor]:
        return self.fixed()

    def weights_file(self, ours: list[str]) -> tuple[str, dict[str, str]]:
        """Weights stand in a checkpoint under the module's own names."""
        return "model", {name: name for name in ours}

    def documents(self) -> dict[str, Any]:
        """A `module.json` marks the checkpoint: only the caller's code can make this model again."""
        return {"module": {"class": self.title}}


AnyRun = Run | ModuleRun


def build_module(
    config: Config,
    module: nn.Module,
    out: Path,
    report: Report,
    point: Checkpoint | None,
    mesh: Mesh,
    note: Callable[[str], None],
) -> ModuleRun:
    """Build the run of a module; arguments as of `build.build`. Raises `LockstepError` for what does not fit."""
    parameters = _trained(module)
    tokenizer, tokens = prepare_data(config, None, out / "data", report, point)
    flops = _probe(module, tokenizer.vocab_size, config)
    data = dataset(tokens, config.data.seq_len, config.train.seed)
    module.train()
    engine = OnModule(module, parameters, config, note)
    return ModuleRun(module, tokenizer, data, parameters, mesh, engine, flops)


def title(module: nn.Module) -> str:
    """The class of a module, as errors and checkpoints name it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def check_arguments(config: Config, given: Model | None, module: nn.Module) -> None:
    """Refuse what is no module, and what only a Lockstep model can do."""
    if not isinstance(module, nn.Module):
        raise LockstepError(f"Trainer: module must be a torch.nn.Module, found {type(module).__name__}")
    if given is not None:
        raise LockstepError("Trainer: a loaded Model and a module were given, and one run trains one: leave one out")
    if config.train.numerics != "fast":
        raise LockstepError(
            f"train.numerics is {config.train.numerics}, but a module without contract kernels cannot keep the "
            'bits: set train.numerics to "fast"'
        )
    free = {"vocab_size": config.model.vocab_size} if isinstance(config.model, ModelConfig) else {}
    if config.model != ModelConfig.model_validate({**DEFAULT_MODEL, **free}):
        raise LockstepError(
            "model describes another model than the module that is given: leave it out, all but model.vocab_size "
            "(the entries of a tokenizer that is trained on the corpus)"
        )
    plain, mesh = CompileConfig(), config.parallel
    for key, changed, advice in (
        ("lora.rank", config.lora.rank > 0, "freeze parameters (requires_grad_(False)) or give a module with adapters"),
        ("train.canonical_tp", config.train.canonical_tp is not None, "leave it out"),
        ("train.export", config.train.export, "take the weights from the checkpoint's model.safetensors"),
        ("parallel", mesh != Config().parallel, "leave it out: a module trains in one process"),
        ("compile.disable_pass", config.compile.disable_pass != plain.disable_pass, "leave it out"),
        ("compile.only_pass", config.compile.only_pass != plain.only_pass, "leave it out"),
        ("compile.recompute", config.compile.recompute != plain.recompute, "checkpoint inside the module"),
        ("compile.explain", config.compile.explain, "use TORCH_LOGS, which torch.compile reads"),
    ):
        if changed:
            raise LockstepError(f"{key} is for Lockstep's own models, and this run trains a module: {advice}")


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    if isinstance(module, torch.jit.ScriptModule):
        raise LockstepError(
            f"{title(module)} is a traced or scripted module, which no level can look into: give the module that it "
            "was made of"
        )
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise LockstepError(f"{title(module)} has no parameter that trains: requires_grad_(True) those that should")
    for name, p in module.named_parameters():
        if is_lazy(p):
            raise LockstepError(f"{title(module)}: {name} has no shape yet: call the module once, on tokens, before")
        if p.device.type != "cpu":
            how = 'call .to_empty(device="cpu") and give it values' if p.is_meta else "call .cpu()"
            raise LockstepError(f"{title(module)}: {name} is on {p.device}; modules train on the CPU: {how}")
    for name, p in found.items():
        if p.dtype != torch.float32:
            raise LockstepError(
                f"{title(module)}: {name} is {p.dtype}; masters are float32: call .float() first, and let train.dtype "
                "choose the compute dtype"
            )
        if wrong := not_contiguous(name, p):
            raise LockstepError(f"{title(module)}: {wrong}")
    return found


@torch.no_grad()
def _probe(module: nn.Module, vocabulary: int, config: Config) -> float:
    """One full row through the module, so that what does not fit is told at once. Returns a token's forward FLOPs."""
    columns = config.data.seq_len
    tokens = ((vocabulary - 1 - torch.arange(columns)) % vocabulary).view(1, -1)
    row = f"{title(module)} on tokens, int64 [1, {columns}] with ids below {vocabulary}"
    forward = logits_of(module, getattr(torch, config.train.dtype))
    try:
        with evaluating(module), FlopCounterMode(display=False) as counter:
            logits = forward(tokens, torch.arange(columns).view(1, -1))
    except Exception as error:  # the caller's code: whatever it raises is the answer
        raise LockstepError(
            f"{row}, fails: {type(error).__name__}: {error}. It must take ids up to the tokenizer's vocabulary "
            "(model.vocab_size, data.tokenizer) and rows of data.seq_len"
        ) from error
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise LockstepError(f"{row}, gives {_kind(logits)}; expected logits, or an object that holds .logits")
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise LockstepError(f"{row}, gives logits {list(logits.shape)}; expected [1, {columns}, vocabulary]")
    if logits.shape[2] < vocabulary:
        raise LockstepError(
            f"the tokenizer has {vocabulary} tokens but {title(module)} only {logits.shape[2]} logits: set "
            f"model.vocab_size to at most {logits.shape[2]}, or data.tokenizer to the module's own tokenizer"
        )
    return counter.get_total_flops() / columns


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
