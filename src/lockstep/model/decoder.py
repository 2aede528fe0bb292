"""The decoder: the one place where a transformer block is written. Trainer and server call the same code.

A block computes with the operators it is given and with sums of two tensors, nothing else: what is not an
operator would not be under the bit contract.

The residual stream is float32 in every compute dtype: norms read it and give the compute dtype, branches are added
to it. In bfloat16 that takes most of the rounding error out of the logits (docs/numerics.md has the measurement).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.model.linear import Linear, WeightCache, pack_weight, unset
from lockstep.model.mla import LatentAttention
from lockstep.model.mlp import MLP
from lockstep.model.moe import Experts, MoE, Routed, Router
from lockstep.model.norm import Norm
from lockstep.model.rope import tables
from lockstep.model.split import split_of
from lockstep.ops import Int8Pages, KVPages, Operators, Packed, Paged, Pages, check_head_dim

BlockCall = Callable[..., Tensor]
"""(layer, block, and the arguments of `Block.forward`) -> its result"""


def _plainly(layer: int, block: nn.Module, *arguments: object) -> Tensor:
    x: Tensor = block(*arguments)
    return x


class Decoder(nn.Module):
    """A decoder-only transformer. Parameters lie on the meta device until `random_decoder` or `load` gives them values.

    They may be float32 (masters, for training) or as stored; each is rounded to the compute dtype at use.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = Norm(config, config.hidden_size)
        self.output = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self._tables = tables(config)
        self._head_cache = WeightCache(lambda ops, weight, dtype: pack_weight(ops, weight, dtype, "vocabulary"))
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                module.split = split_of(name)

    def forward(
        self,
        ops: Operators,
        tokens: Tensor,
        batch: Packed | Paged,
        cache: Sequence[Pages] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        rope: tuple[Tensor, Tensor] | None = None,
        routed: list[Routed] | None = None,
    ) -> Tensor:
        """tokens int [T] -> hidden [T, D] in dtype, after the final norm.

        With a Packed batch sequences are whole. With a Paged one `cache` holds the pages of each layer (`make_pages` of
        `model/pages.py`): the new keys and values, or latents, are written into them, then each row attends to its
        sequence's pages. rope: what `rope_tables` gives for the batch, where the caller keeps it (a captured graph's
        input). routed: takes what the router of each layer with experts did, for the balance loss.
        """
        x = self.start(ops, tokens, dtype)
        layers = range(len(self.layers))
        x = self.blocks(ops, x, batch, rope or self.rope_tables(batch), layers, cache, dtype, routed=routed)
        return self.norm(ops, x, dtype)

    def start(self, ops: Operators, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens int [T] -> the residual stream float32 [T, D] before the first block."""
        return ops.embedding(tokens, self.embed.weight, dtype, self.config.embedding_scale).float()

    def blocks(
        self,
        ops: Operators,
        x: Tensor,
        batch: Packed | Paged,
        rope: tuple[Tensor, Tensor],
        layers: range,
        cache: Sequence[Pages] | None,
        dtype: torch.dtype,
        call: BlockCall = _plainly,
        routed: list[Routed] | None = None,
    ) -> Tensor:
        """The residual stream through some of the layers. call: how each block is called; what recomputes is one."""
        full, sliding = rope
        for i in layers:
            table = sliding if self.config.slides(i) else full
            x = call(i, self.layers[i], ops, x, batch, table, None if cache is None else cache[i], dtype, routed)
        return x

    def head(self, ops: Operators, hidden: Tensor) -> Tensor:
        """hidden [T, D] -> logits float32 [T, V]."""
        weight = self._head_cache.get(self.head_weight, ops, hidden.dtype)
        linear = ops.cut["vocabulary"].linear if "vocabulary" in ops.cut else ops.linear
        logits = linear(hidden, weight, None, out_dtype=torch.float32)
        return ops.softcap(logits, self.logit_softcap) if self.logit_softcap else logits

    @property
    def logit_softcap(self) -> float:
        """The soft cap on logits, for `linear_cross_entropy`; 0.0 where there is none."""
        return self.config.logit_softcap or 0.0

    @property
    def head_weight(self) -> nn.Parameter:
        """The output projection [V, D]: the embedding where the two are tied."""
        return self.embed.weight if self.output is None else self.output.weight

    def rope_tables(self, batch: Packed | Paged) -> tuple[Tensor, Tensor]:
        """The tables of full and of sliding layers, with a row for each position of the batch."""
        full, sliding = self._tables
        count = min(self.config.max_positions, max(4096, batch.position_bound))
        first = full.rows(count, batch.positions.device)
        return first, first if sliding is full else sliding.rows(count, batch.positions.device)

    def prepare(self, ops: Operators, dtype: torch.dtype) -> None:
        """Pack every linear weight for inference in dtype, where not done yet. Training never reads the packs."""
        for module in self.modules():
            if isinstance(module, Linear | Router | Experts) and module is not self.output:
                module.prepare(ops, dtype)
        self._head_cache.fill(self.head_weight, ops, dtype)

    def packed_names(self) -> list[str]:
        """The parameters that a prepared decoder reads in their packed form alone."""
        modules = self.named_modules()
        return [f"{name}.weight" for name, module in modules if isinstance(getattr(module, "cache", None), WeightCache)]


class Embedding(nn.Module):
    """weight [V, D]."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = unset(rows, width)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with post_norms each branch is normed before its sum too."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        width = config.hidden_size
        self.attn_norm, self.attn = Norm(config, width), attention(config, layer)
        self.mlp_norm = Norm(config, width)
        self.mlp = MoE(config) if config.has_experts(layer) else MLP(config)
        self.attn_post_norm = Norm(config, width) if config.post_norms else None
        self.mlp_post_norm = Norm(config, width) if config.post_norms else None

    def forward(
        self,
        ops: Operators,
        x: Tensor,
        batch: Packed | Paged,
        rope: Tensor,
        pages: Pages | None,
        dtype: torch.dtype,
        routed: list[Routed] | None = None,
    ) -> Tensor:
        """x float32 [T, D] -> [T, D], its branches computed in dtype. rope: this layer's table. pages: this layer's
        keys and values, or latents, with a Paged batch."""
        h = self.attn(ops, self.attn_norm(ops, x, dtype), batch, rope, pages)
        x = x + (h if self.attn_post_norm is None else self.attn_post_norm(ops, h))
        h, mlp = self.mlp_norm(ops, x, dtype), self.mlp
        h = mlp(ops, h, routed) if isinstance(mlp, MoE) else mlp(ops, h)
        return x + (h if self.mlp_post_norm is None else self.mlp_post_norm(ops, h))


def attention(config: ModelConfig, layer: int) -> nn.Module:
    """The attention of a layer: latent where the configuration has latents."""
    return Attention(config, layer) if config.kv_lora_rank is None else LatentAttention(config)


def check_widths(config: ModelConfig) -> None:
    """LockstepError for widths of heads that the contract's attention does not take."""
    check_head_dim(config.head_dim)
    if config.v_head_dim is not None:
        check_head_dim(config.v_head_dim, "v_head_dim")
    if config.kv_lora_rank is not None and config.mla_form == "absorbed":
        check_head_dim(config.kv_lora_rank, "kv_lora_rank")
        check_head_dim(config.rope_dim, "qk_rope_head_dim")


class Attention(nn.Module):
    """Causal attention with grouped keys and values, rotary positions, and per-head norms where the family has them."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.head_dim, self.scale, self.softcap = dim, config.scale, config.attention_softcap or 0.0
        self.window = config.sliding_window if config.slides(layer) else None
        self.q = Linear(width, config.num_heads * dim, config.qkv_bias)
        self.k = Linear(width, config.num_kv_heads * dim, config.qkv_bias)
        self.v = Linear(width, config.num_kv_heads * dim, config.qkv_bias)
        self.o = Linear(config.num_heads * dim, width)
        self.q_norm = Norm(config, dim) if config.qk_norm else None
        self.k_norm = Norm(config, dim) if config.qk_norm else None

    def forward(self, ops: Operators, x: Tensor, batch: Packed | Paged, rope: Tensor, pages: Pages | None) -> Tensor:
        # The three products side by side: compiled, they are one.
        q, k, v = map(self._heads, [linear(ops, x) for linear in (self.q, self.k, self.v)])
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(ops, q), self.k_norm(ops, k)
        q, k = ops.rope(q, batch.positions, rope), ops.rope(k, batch.positions, rope)
        if isinstance(batch, Packed):
            y = ops.attention(q, k, v, batch, self.scale, self.window, self.softcap)
        else:
            assert isinstance(pages, KVPages | Int8Pages), "a Paged batch needs the pages of its cache"
            ops.write_kv(k, v, pages, batch)
            y = ops.paged_attention(q, pages, batch, self.scale, self.window, self.softcap)
        return self.o(ops, y.flatten(1))  # x may be a device's share of the rows

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)  # a device may have no row
