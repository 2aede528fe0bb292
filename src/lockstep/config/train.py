"""The sections of a training run: data, optimizer, schedule, LoRA and the loop itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lockstep.config.section import Section


class DataConfig(Section):
    """What is trained on, and how it is cut into sequences."""

    sources: list[str] = Field(default_factory=lambda: ["stdlib"], min_length=1)
    """Text files, folders, `.jsonl` files, `.json` arrays of records, `hf:NAME[:SPLIT]` (Hugging Face
    `datasets`), or `stdlib`: the Python standard library's own source on this machine."""
    text_field: str = "text"
    """The field of a JSONL record or dataset row that holds its text."""
    messages_field: str = "messages"
    """The field that holds chat messages; a record that has it goes through the chat template."""
    assistant_only: bool = False
    """Chat records: the loss counts only the tokens of the assistant's turns."""
    tokenizer: str | None = None
    """A directory with `tokenizer.json`. None: the loaded model's own, or for a new model a byte-level BPE
    of `model.vocab_size` entries trained on the corpus."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Use only the beginning of the corpus, this many bytes of text; the last document may be cut."""
    seq_len: int = Field(default=512, ge=8)
    """Tokens in a packed training sequence."""
    held_out: float = Field(default=0.02, ge=0.0, lt=1.0)
    """The fraction of documents kept out of training and used for evaluation."""


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019) with decoupled decay, in float32."""

    lr: float = Field(default=2e-3, gt=0.0)
    """The peak learning rate; the schedule multiplies it."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay; norms and biases have none."""
    clip_norm: float = Field(default=1.0, ge=0.0)
    """The largest global gradient norm; 0 turns clipping off."""


class ScheduleConfig(Section):
    """The learning rate over the steps, as a factor of `optimizer.lr`."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: `cosine` falls to `final` at the last step, `wsd` stays at 1 and falls linearly over
    the last `decay_steps`, `constant` stays at 1."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps over which the factor rises linearly to 1. None: a tenth of `train.steps`, at most 20."""
    decay_steps: int | None = Field(default=None, ge=0)
    """`wsd` only: steps of the final fall. None: a sixth of `train.steps`, at most 50."""
    final: float = Field(default=0.1, ge=0.0, le=1.0)
    """The factor at the last step of `cosine` and `wsd`."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., 2021): the base weights are frozen, only the adapters train."""

    rank: int = Field(default=0, ge=0)
    """The adapters' rank; 0 trains the whole model."""
    alpha: float = Field(default=16.0, gt=0.0)
    """The adapters' output is multiplied by alpha / rank."""
    targets: list[str] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
    )
    """The linear layers that get an adapter, by Hugging Face name."""
    merge: bool = True
    """On export: fold the adapters into the weights; false writes them beside, in PEFT's format."""


class TrainConfig(Section):
    """The training loop."""

    out: str = "runs/train"
    """The run's directory: checkpoints, metrics, token cache, export."""
    steps: int = Field(default=300, gt=0)
    """Optimizer steps in the whole run."""
    micro_batch: int = Field(default=4, gt=0, le=1 << 20)
    """Sequences in a canonical micro-batch: one forward and backward pass."""
    micro_batches: int = Field(default=2, gt=0, le=1 << 20)
    """Micro-batches in a global batch."""
    gradient_groups: int | None = Field(default=None, gt=0, le=1 << 20)
    """The number of equal groups of neighbouring micro-batches whose float32 gradients are added one after the other,
    in one place; the groups' sums are added by a fixed binary tree. Part of the run's numerics: at most so many
    replicas (`parallel.dp`) give the same bits. Fewer take less memory. None: every micro-batch is a group."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The compute dtype; master weights, gradients' sums and the optimizer's moments are float32."""
    canonical_tp: int | None = Field(default=None, ge=1)
    """The number of segments in which products across tensor-parallel ranks are summed, from the first step on; any
    `parallel.tp` that divides it gives the same bits. None: the model's own, 1 for a new one."""
    numerics: Literal["bitwise", "fast"] = "bitwise"
    """`bitwise` runs the kernels under the bit contract, `fast` plain PyTorch."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights and of the data order."""
    z_loss: float = Field(default=0.0, ge=0.0)
    """Weight of log(Z)^2 in the loss (PaLM); keeps the logits' normaliser near 1."""
    eval_every: int = Field(default=100, ge=0)
    """Evaluate on held-out text every so many steps and at the end; 0: never."""
    eval_sequences: int = Field(default=32, gt=0)
    """The most held-out sequences in one evaluation."""
    log_every: int = Field(default=1, gt=0)
    """Write metrics every so many steps."""
    tensorboard: bool = True
    """Also write metrics for TensorBoard, in `<out>/tensorboard`."""
    save_every: int = Field(default=100, ge=0)
    """Save a checkpoint every so many steps; 0: only at the end or when stopped."""
    keep_last: int = Field(default=2, gt=0)
    """How many of the newest checkpoints stay."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of steps that are multiples of this stay for ever; 0: none."""
    max_bad_steps: int = Field(default=5, gt=0)
    """Stop after this many steps in a row with a NaN or infinite loss or gradient; each is skipped."""
    export: bool = False
    """At the end write a Hugging Face directory, `<out>/export`."""

    @property
    def groups(self) -> int:
        """Canonical groups of micro-batches in a global batch."""
        return self.micro_batches if self.gradient_groups is None else self.gradient_groups

    @property
    def group_size(self) -> int:
        """Micro-batches of a canonical group."""
        return self.micro_batches // self.groups

    @model_validator(mode="after")
    def _equal_groups(self) -> TrainConfig:
        if self.micro_batches % self.groups:
            raise ValueError(
                f"gradient_groups {self.groups} does not divide micro_batches {self.micro_batches}: groups are of "
                "equal length; set it to a divisor, or leave it out"
            )
        return self
