"""What a decoder is: sizes, and the few choices in which the families differ."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.section import Section

Positive = Annotated[int, Field(gt=0)]


class RopeScaling(Section):
    """How the rotary frequencies are stretched beyond the positions of the first training."""

    kind: Literal["linear", "llama3"]
    """linear: every frequency divided by factor. llama3: only the long wavelengths, with a smooth passage."""
    factor: float = Field(gt=0)
    """By how much the frequencies are divided."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_max_positions / low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_max_positions / high_freq_factor are left alone."""
    original_max_positions: Positive = 8192
    """llama3: positions of the first training."""


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ModelConfig(Section):
    """A decoder-only transformer: pre-norm blocks of causal attention (GQA) and a gated MLP."""

    family: str = "llama"
    """Whose block this is, and the model_type on export: llama, mistral, qwen2, qwen3 or gemma3_text."""
    vocab_size: Positive
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    hidden_size: Positive
    """Width of the residual stream."""
    intermediate_size: Positive
    """Width of the gated MLP."""
    num_layers: Positive
    """Transformer blocks."""
    num_heads: Positive
    """Query heads."""
    num_kv_heads: Positive
    """Key and value heads; divides num_heads. Default: num_heads."""
    head_dim: Positive
    """Width of a head; even. Default: hidden_size / num_heads."""
    max_positions: Positive = 2048
    """Longest sequence."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in every RMS norm."""
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma: 1, so that a weight of 0 is the identity)."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base wavelength of the rotary position embedding."""
    rope_theta_local: float | None = None
    """Base wavelength in sliding-window layers (Gemma 3), unscaled. None: as in the others."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the MLP's gate."""
    tie_embeddings: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm over each query and key head before the rotation (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """A norm after attention and MLP too, before the residual sum (Gemma 3)."""
    embedding_scale: float = 1.0
    """Factor on the embeddings (Gemma: sqrt(hidden_size)); rounded to the compute dtype first."""
    sliding_window: Positive | None = None
    """A sliding layer's query sees the last this many positions, itself included. None: no layer slides."""
    layer_windows: Annotated[tuple[bool, ...], BeforeValidator(_as_tuple)] | None = None
    """One entry per layer: whether it slides. None: all do when sliding_window is set (Mistral)."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor on q . k. None: head_dim ** -0.5."""
    canonical_tp: Positive = 1
    """The number of segments in which products across tensor-parallel ranks are summed: part of the model's numerics.
    A power of two that divides num_kv_heads and intermediate_size; any tensor-parallel degree that divides it gives
    the same bits."""
    bos_id: int | None = None
    """Token that starts a sequence."""
    eos_ids: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    """Tokens that end a generation."""
    pad_id: int | None = None
    """Padding token, only carried into the exported config.json."""

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, data: Any) -> Any:
        """Fill num_kv_heads and head_dim from the sizes they usually follow."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = data.get("num_heads"), data.get("hidden_size")
        if data.get("num_kv_heads") is None and heads is not None:
            data["num_kv_heads"] = heads
        if data.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            if hidden % heads:
                raise ValueError(f"hidden_size {hidden} is no multiple of num_heads {heads}: set head_dim")
            data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: the rotary embedding turns pairs")
        n = self.canonical_tp
        if n & (n - 1) or self.num_kv_heads % n or self.intermediate_size % n:
            raise ValueError(
                f"canonical_tp {n} must be a power of two that divides num_kv_heads {self.num_kv_heads} and "
                f"intermediate_size {self.intermediate_size}"
            )
        if self.layer_windows is not None and len(self.layer_windows) != self.num_layers:
            raise ValueError(f"layer_windows has {len(self.layer_windows)} entries for num_layers {self.num_layers}")
        if self.layer_windows is not None and any(self.layer_windows) and self.sliding_window is None:
            raise ValueError("layer_windows names sliding layers, but sliding_window is not set")
        return self

    def slides(self, layer: int) -> bool:
        """Whether this layer attends over the sliding window only."""
        if self.sliding_window is None:
            return False
        return self.layer_windows is None or self.layer_windows[layer]

    @property
    def scale(self) -> float:
        """Factor on q . k."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
