"""A run of any `torch.nn.Module`: learning, documents, resume, levels through torch.compile, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import lockstep
from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.ops import Packed
from lockstep.train import Trainer, speed
from lockstep.train.checkpoint import checkpoints
from lockstep.train.data import Batch
from lockstep.train.metrics import read_metrics
from lockstep.train.module_blocks import repeated
from lockstep.train.module_engine import grid, losses

Tiny = Callable[..., Config]
VOCABULARY = 300


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)


class Gru(nn.Module):
    """A recurrent model with a tied head, dropout, a frozen parameter and a buffer that its forward changes."""

    def __init__(self, vocabulary: int = VOCABULARY, tied: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 24, sparse=not tied)  # a sparse gradient cannot be added to a dense one
        self.cell = nn.GRU(24, 24, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.full((24,), 4.0), requires_grad=False)
        self.head = nn.Linear(24, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.head(self.dropout(self.cell(self.embed(tokens))[0] * self.scale))


class Mixer(nn.Module):
    """A causal running mean between two linear layers: little for Inductor to compile."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32)
        self.head, self.breaks = nn.Linear(32, VOCABULARY), breaks

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.breaks:
            torch._dynamo.graph_break()
        x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)
        return self.head(torch.nn.functional.gelu(self.up(x)))


def made(kind: Callable[..., nn.Module], **keys: Any) -> nn.Module:
    torch.manual_seed(3)
    return kind(**keys)


def llama(layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes))


def run(tiny: Tiny, module: nn.Module, out: Path, resume: Path | None = None, **sections: dict[str, Any]) -> Trainer:
    """A run without the shape of a model, whose tokenizer has as many entries as the module's logits."""
    sections["train"] = {"numerics": "fast", **sections.get("train", {})}
    config = tiny(out, **sections).model_copy(update={"model": Config().model})
    return Trainer(config, resume=resume, module=module, model={"vocab_size": VOCABULARY})


def fitted(*arguments: Any, **sections: Any) -> Trainer:
    trainer = run(*arguments, **sections)
    trainer.fit()
    return trainer


def held(trainer: Trainer) -> dict[str, Tensor]:
    found = trainer.state_dict()
    return {name: tensor.clone() for part in ("model", "optimizer") for name, tensor in found[part].items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("kind", "dtype"), [(Gru, "float32"), (llama, "float32"), (llama, "bfloat16")])
def test_loss_falls_on_real_text(tiny: Tiny, tmp_path: Path, kind: Callable[..., nn.Module], dtype: str) -> None:
    sections = {"train": {"steps": 30, "dtype": dtype, "eval_every": 30}, "optimizer": {"lr": 1e-2}}
    trainer = fitted(tiny, made(kind), tmp_path / "run", **sections)
    lines = read_metrics(trainer.out)
    values = [m["loss"] for m in lines if "loss" in m]
    assert values[-1] < values[0] - 0.8
    (found,) = [m["eval_loss"] for m in lines if "eval_loss" in m]
    assert found < values[0] - 0.8
    assert all(m["mfu"] > 0 for m in lines if "loss" in m)


@pytest.mark.parametrize("kind", [Gru, llama])
def test_a_resumed_run_has_the_same_weights(tiny: Tiny, tmp_path: Path, kind: Callable[..., nn.Module]) -> None:
    """Moments, the buffer that counts calls and the generator that dropout draws from are in the checkpoint."""
    whole = fitted(tiny, made(kind), tmp_path / "whole")
    out = tmp_path / "parts"
    fitted(tiny, made(kind), out, train={"save_every": 2, "keep_last": 9})
    torch.manual_seed(99)
    again = run(tiny, kind(), out, out / "checkpoints" / "step-00000002")
    assert again.position.step == 2
    again.fit()
    assert same(held(again), held(whole))
    assert "head.weight" not in held(again) or kind is llama  # a shared parameter is held once
    if kind is Gru:
        assert int(again.run.module.calls) == 6 * 3


def test_a_checkpoint_loads_into_the_plain_module(tiny: Tiny, tmp_path: Path) -> None:
    trainer = fitted(tiny, made(Gru, tied=False), tmp_path / "run", train={"steps": 2})
    fresh = Gru(tied=False)
    fresh.load_state_dict(load_file(checkpoints(trainer.out)[-1] / "model.safetensors"))
    assert same(fresh.state_dict(), trainer.run.module.state_dict())
    assert torch.equal(fresh.scale, torch.full((24,), 4.0))  # frozen
    with pytest.raises(LockstepError, match=r"is a checkpoint of a torch.nn.Module \(.*Gru\), which only the code"):
        lockstep.load(trainer.out)


def several(lengths: list[int]) -> Batch:
    """Documents of these lengths; every fifth token has no target."""
    tokens, targets = torch.randint(
        VOCABULARY, (2, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths))
    )
    targets[::5] = -1
    return Batch(tokens, targets, Packed.of(lengths))


def test_the_gradient_is_that_of_the_mean_loss(tiny: Tiny, tmp_path: Path) -> None:
    """Against PyTorch's cross-entropy over the documents one by one, in float64; a document sees only itself."""
    module = made(llama)
    trainer = run(tiny, module, tmp_path / "run", train={"z_loss": 0.1})
    batches = [several([10, 15, 7, 20, 9]), several([32, 1, 1, 30]), several([5, 6, 7])]
    found = trainer.run.engine.gradient(batches, 0.1, lambda: False)
    trainer.close()
    module.double()
    total, z, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        for start, end in zip(batch.packed.starts[:-1].tolist(), batch.packed.starts[1:].tolist(), strict=True):
            logits = module(batch.tokens[start:end].view(1, -1)).logits[0]
            targets, kept = batch.targets[start:end], batch.targets[start:end] >= 0
            total = total + nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-1)
            z, count = z + logits.logsumexp(-1).square()[kept].sum(), count + int(kept.sum())
    ((total + 0.1 * z) / count).backward()
    # float32 sums of a few hundred terms against float64: relative 1e-5 of the largest element.
    for ours, parameter in zip(found.gradient, module.parameters(), strict=True):
        exact = parameter.grad
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    assert found.loss == pytest.approx(float(total.detach()) / count, rel=1e-6)
    assert found.objective == pytest.approx(float((total + 0.1 * z).detach()) / count, rel=1e-6)


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(12, 20))
def test_rows_hold_every_document_once(sequences: list[list[int]], columns: int) -> None:
    fitting = [[n for i, n in enumerate(s) if sum(s[: i + 1]) <= columns] for s in sequences]
    lengths = [n for s in fitting for n in s]
    tokens = torch.arange(1, sum(lengths) + 1)
    batch = Batch(tokens, tokens + 1000, Packed.of(lengths))
    got, targets, positions = grid(batch, len(fitting), columns)
    assert got.shape == targets.shape == positions.shape == (len(fitting), columns)
    real = targets >= 0
    assert torch.equal(got[real], batch.tokens)
    assert torch.equal(targets[real], batch.targets)
    assert torch.equal(positions[real], batch.packed.positions.long())
    assert not got[~real].any()
    # Within a row a position is 0 or the one before it plus 1: filling counts anew and joins no document.
    assert not positions[:, 0].any()
    assert ((positions[:, 1:] == 0) | (positions.diff(dim=1) == 1)).all()
    assert int((positions == 0).sum()) == len(lengths) + int((~real).any(1).sum())


def test_z_loss_and_masked_rows() -> None:
    logits = torch.randn(2, 3, 7)
    targets = torch.tensor([[1, -1, 2], [-1, -1, 6]])
    objective, logprobs = losses(lambda tokens, positions: logits, 0.5)(targets, targets, targets)
    kept = targets >= 0
    expected = logits.double().log_softmax(-1)[kept].gather(-1, targets[kept][:, None])[:, 0]
    # One float32 log-sum-exp of seven terms: a few units in the last place.
    torch.testing.assert_close(logprobs[kept].double(), expected, rtol=1e-5, atol=1e-6)
    z = logits.double().logsumexp(-1)[kept].square().sum()
    assert float(objective) == pytest.approx(float(0.5 * z - expected.sum()), rel=1e-5)


def test_evaluation_is_without_dropout_and_leaves_the_modes(tiny: Tiny, tmp_path: Path) -> None:
    module = made(Gru, dropout=0.9)
    trainer = run(tiny, module, tmp_path / "run")
    module.dropout.eval()
    one, two = (trainer.run.engine.evaluate(trainer.run.data, 4, 2) for _ in range(2))
    assert one == two
    assert (module.training, module.dropout.training, int(module.calls)) == (True, False, 0)
    trainer.close()


class Lazy(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(VOCABULARY)


def transposed(module: Mixer) -> Mixer:
    module.up.weight.data = module.up.weight.data.T.contiguous().T
    return module


class Odd(nn.Module):
    """Gives whatever it was made with."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.result = nn.Parameter(torch.zeros(1)), result

    def forward(self, tokens: Tensor) -> Any:
        return self.result(tokens)


@pytest.mark.parametrize(
    ("module", "sections", "message"),
    [
        (Gru(), {"train": {"numerics": "bitwise"}}, "without contract kernels cannot keep the bits: set"),
        (Gru(), {"lora": {"rank": 2}}, "lora.rank is for Lockstep's own models"),
        (Gru(), {"train": {"export": True}}, r"train.export .* take the weights from the checkpoint"),
        (Gru(), {"parallel": {"dp": 2}}, "parallel is for .* one process"),
        (Gru(), {"compile": {"recompute": "full"}}, "compile.recompute"),
        (Gru(), {"compile": {"explain": True}}, "compile.explain"),
        (Gru(vocabulary=200), {}, "fails: IndexError.*ids up to the tokenizer's vocabulary"),
        (Gru().double(), {}, "is torch.float64; masters are float32: call .float"),
        (transposed(Mixer()), {}, r"up.weight is not contiguous, .* set its .data to .data.contiguous\(\)"),
        (Mixer().to("meta"), {}, r'embed.weight is on meta; .* call .to_empty\(device="cpu"\) and give it values'),
        (Lazy(), {}, "head.weight has no shape yet: call the module once, on tokens"),
        (Gru().requires_grad_(False), {}, "has no parameter that trains"),
        (Odd(lambda t: (t,)), {}, "gives tuple; expected logits"),
        (Odd(lambda t: t), {}, "gives a tensor of torch.int64; expected logits"),
        (Odd(lambda t: t.float()), {}, r"gives logits \[1, 32\]; expected \[1, 32, vocabulary\]"),
        (Odd(lambda t: torch.zeros(*t.shape, 9)), {}, "300 tokens but .*Odd only 9 logits: set model.vocab_size"),
        ("net", {}, "must be a torch.nn.Module, found str"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(tiny: Tiny, tmp_path: Path, module: Any, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(LockstepError, match=message):
        run(tiny, module, tmp_path / "run", **sections)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_traced_module_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    traced = torch.jit.trace(Mixer(), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(LockstepError, match=r"is a traced or scripted module, .* give the module that it was made of"):
        run(tiny, traced, tmp_path / "run")


def test_a_described_model_beside_a_module_is_refused(tiny: Tiny) -> None:
    with pytest.raises(LockstepError, match="model describes another model than the module"):
        Trainer(tiny(train={"numerics": "fast"}), module=Gru())


def test_a_checkpoint_goes_only_into_its_own_kind(tiny: Tiny, tmp_path: Path) -> None:
    trainer = fitted(tiny, made(Gru), tmp_path / "run", train={"steps": 2})
    with pytest.raises(LockstepError, match=r"use that object itself"):
        _ = trainer.model
    with pytest.raises(LockstepError, match=r"holds the module .*Gru, but this run trains the module .*Mixer: give"):
        run(tiny, Mixer(), tmp_path / "run", trainer.out, train={"steps": 2})
    with pytest.raises(LockstepError, match=r"holds the module .*Gru, but this run trains a Lockstep model"):
        Trainer(tiny(tmp_path / "run", train={"numerics": "fast"}), resume=trainer.out, allow_changes=True)
    with pytest.raises(LockstepError, match=r"embed.weight is \[300, 24\]"):
        run(tiny, Gru(VOCABULARY + 4), tmp_path / "run", trainer.out, train={"steps": 2})


def test_what_inductor_cannot_compile_runs_eagerly_and_says_so(tiny: Tiny, tmp_path: Path) -> None:
    """No compilation takes place: the graph is refused while it is traced."""
    notes: list[str] = []
    trainer = run(tiny, made(Mixer, breaks=True), tmp_path / "O2", compile={"level": "O2"}, train={"steps": 2})
    trainer.run.engine._note = notes.append
    trainer.fit()
    assert len(notes) == 2
    assert "close to O0, not the same bits" in notes[0]
    assert "O2 is not possible here, so the module runs as at O0; O1 compiles the parts that it can" in notes[1]
    plain = fitted(tiny, made(Mixer), tmp_path / "O0", train={"steps": 2})
    assert same(held(trainer), held(plain))


def test_a_compiler_that_an_interruption_ends_is_no_reason_to_give_up(tiny: Tiny, tmp_path: Path) -> None:
    """Ctrl-C reaches the C++ compiler too, whose failure comes before the loop looks at the signal."""
    notes: list[str] = []
    trainer = run(tiny, made(Mixer, breaks=True), tmp_path / "run", compile={"level": "O2"}, train={"steps": 2})
    engine, train = trainer.run.engine, trainer.config.train
    engine._note = notes.append
    batches = trainer.run.data.global_batch(0, train.micro_batch, train.micro_batches)
    asked = iter([False, True])  # before the micro-batch, and when its compilation has failed
    assert engine.gradient(batches, 0.0, lambda: next(asked)) is None
    trainer.close()
    assert len(notes) == 1, "that it compiles, and not that O2 is not possible here"


def test_blocks_alike_are_compiled_once(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounter

    counter, real = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, **keys: real(what, backend=counter, **keys))
    torch._dynamo.reset()
    notes: list[str] = []
    trainer = run(tiny, made(llama, layers=4), tmp_path / "O1", compile={"level": "O1"}, train={"steps": 2})
    trainer.run.engine._note = notes.append
    trainer.fit()
    assert notes == [
        "compile.level O1: torch.compile (Inductor) of 4 blocks (LlamaDecoderLayer), each kind once, in the first "
        "step, for a minute or more; close to O0, not the same bits"
    ]
    assert counter.frame_count == 1
    assert not any("forward" in vars(part) for part in trainer.run.module.modules()), "evaluation is eager"
    plain = fitted(tiny, made(llama, layers=4), tmp_path / "O0", train={"steps": 2})
    assert same(held(trainer), held(plain)), "the graph as it is has the operators of the eager module"


def test_repeated_blocks_are_the_outermost_that_are_no_single_layers() -> None:
    assert [type(block).__name__ for block in repeated(made(llama))] == ["LlamaDecoderLayer"] * 2
    assert repeated(Mixer()) == []
    assert repeated(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    inner = [nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))) for _ in range(3)]
    assert repeated(nn.ModuleList(inner)) == inner


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Mixer, llama])
def test_levels_are_close(tiny: Tiny, tmp_path: Path, kind: Callable[..., nn.Module]) -> None:
    """`pytest -m slow tests/train/test_module.py`: Inductor compiles C++, tens of seconds a level."""
    gradients, values = {}, {}
    for level in ("O0", "O1", "O2"):
        torch._dynamo.reset()
        trainer = run(tiny, made(kind), tmp_path / level, compile={"level": level}, train={"steps": 3})
        batches = [several([10, 15, 7, 20, 9]), several([32, 1, 1, 30])]
        gradients[level] = trainer.run.engine.gradient(batches, 0.0, lambda: False)
        trainer.fit()
        engine = trainer.run.engine  # nothing was given up
        assert (engine._losses is engine._eager and engine._blocks is None) == (level == "O0")
        values[level] = [m["loss"] for m in read_metrics(trainer.out)]
    for level in ("O1", "O2"):
        assert gradients[level].loss == pytest.approx(gradients["O0"].loss, rel=1e-6)
        # Fused float32 sums of some hundred terms: relative 1e-5 of the largest element.
        for ours, eager in zip(gradients[level].gradient, gradients["O0"].gradient, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5 * float(eager.abs().max()))
        # AdamW's first updates, near the sign of the gradient, magnify that where a gradient is near 0.
        assert values[level] == pytest.approx(values["O0"], rel=1e-4)
