"""Training steps of MindSpore on the CPU: a plain Llama with AdamW, compiled as one graph or run in PyNative mode.

    python mindspore_train.py MODEL_DIRECTORY TOKENS.npy float32 graph|pynative LEARNING_RATE [CACHE_DIRECTORY]

Stands alone: imports nothing of Lockstep but the protocol beside it. MindSpore has no Llama of its own; this one is
written as its documentation writes models. CACHE_DIRECTORY: where its compile cache lies (graph mode).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")  # errors only: standard output is what the bench reads
if len(sys.argv) > 6:
    os.environ["MS_COMPILER_CACHE_ENABLE"] = "1"
    os.environ["MS_COMPILER_CACHE_PATH"] = sys.argv[6]

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from step_server import serve  # type: ignore[import-not-found]

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]


class Norm(nn.Cell):
    def __init__(self, weight: Array, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = Parameter(Tensor(weight)), eps

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt(ops.mean(x * x, -1, True) + self.eps) * self.weight


class Linear(nn.Cell):
    def __init__(self, weight: Array) -> None:
        super().__init__()
        self.weight, self.product = Parameter(Tensor(weight)), ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:
        return self.product(x.reshape((-1, x.shape[-1])), self.weight).reshape((*x.shape[:-1], -1))


class Attention(nn.Cell):
    def __init__(self, weights: Weights, config: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.q, self.k, self.v, self.o = (Linear(weights[f"self_attn.{part}_proj.weight"]) for part in "qkvo")
        self.product, self.scores = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = turned(self.split(self.q(x), self.heads), cos, sin)
        k = self.shared(turned(self.split(self.k(x), self.groups), cos, sin))
        v = self.shared(self.split(self.v(x), self.groups))
        scores = self.scores(q, k) * self.dim**-0.5 + mask
        y = self.product(ops.softmax(scores, -1), v)
        return self.o(y.transpose((0, 2, 1, 3)).reshape((batch, length, -1)))

    def split(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        return x.reshape((batch, length, heads, self.dim)).transpose((0, 2, 1, 3))

    def shared(self, x: Tensor) -> Tensor:
        """Every head of keys and values for its group of queries."""
        if self.heads == self.groups:
            return x
        batch, groups, length, dim = x.shape
        wide = ops.tile(x.reshape((batch, groups, 1, length, dim)), (1, 1, self.heads // self.groups, 1, 1))
        return wide.reshape((batch, self.heads, length, dim))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + ops.concat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Cell):
    def __init__(self, weights: Weights, config: dict[str, Any]) -> None:
        super().__init__()
        eps = config["rms_norm_eps"]
        self.attn_norm, self.attn = Norm(weights["input_layernorm.weight"], eps), Attention(weights, config)
        self.mlp_norm = Norm(weights["post_attention_layernorm.weight"], eps)
        self.gate, self.up, self.down = (Linear(weights[f"mlp.{part}_proj.weight"]) for part in ("gate", "up", "down"))

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask)
        h = self.mlp_norm(x)
        return x + self.down(ops.silu(self.gate(h)) * self.up(h))


class Llama(nn.Cell):
    """ids int32 [B, T] -> the mean loss of the next tokens."""

    def __init__(self, weights: Weights, config: dict[str, Any], length: int) -> None:
        super().__init__()
        self.embedding = Parameter(Tensor(weights["model.embed_tokens.weight"]))
        self.blocks = nn.CellList(
            [Block(_of(weights, f"model.layers.{i}."), config) for i in range(config["num_hidden_layers"])]
        )
        self.norm = Norm(weights["model.norm.weight"], config["rms_norm_eps"])
        tied = config["tie_word_embeddings"]
        self.head = None if tied else Parameter(Tensor(weights["lm_head.weight"]))
        self.product = ops.MatMul(transpose_b=True)
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = np.outer(np.arange(length), theta ** (-np.arange(0, dim, 2) / dim))
        wide = np.concatenate([angles, angles], -1)
        self.cos, self.sin = (Tensor(f(wide).astype(np.float32)) for f in (np.cos, np.sin))
        self.mask = Tensor(np.triu(np.full((length, length), -np.inf, np.float32), 1))

    def construct(self, ids: Tensor) -> Tensor:
        x = ops.gather(self.embedding, ids, 0)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.mask)
        x = self.norm(x)[:, :-1].reshape((-1, x.shape[-1]))
        logits = self.product(x, self.embedding if self.head is None else self.head)
        return ops.cross_entropy(logits, ids[:, 1:].reshape((-1,)))


class Step(nn.Cell):
    """ids -> the loss, before an update. A cell, not a function: the compile cache keeps parameters of cells only."""

    def __init__(self, model: nn.Cell, rate: float) -> None:
        super().__init__()
        self.model, self.parameters = model, ms.ParameterTuple(model.trainable_params())
        self.optimizer = nn.Adam(self.parameters, rate, beta1=0.9, beta2=0.95, eps=1e-8)
        self.gradient = ops.value_and_grad(model, None, self.parameters)

    def construct(self, ids: Tensor) -> Tensor:
        loss, gradients = self.gradient(ids)
        return ops.depend(loss, self.optimizer(gradients))


def _of(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def main(directory: str, tokens: str, dtype: str, mode: str, rate: str, cache: str = "") -> None:
    if dtype != "float32":
        raise SystemExit(f"MindSpore's CPU products are float32, not {dtype}")
    ms.set_device("CPU")
    ids = Tensor(np.load(tokens).astype(np.int32))
    weights = {name: value.astype(np.float32) for name, value in load_file(f"{directory}/model.safetensors").items()}
    model = Llama(weights, json.loads(Path(directory, "config.json").read_text()), ids.shape[1])
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    step = Step(model, float(rate))
    step.set_train()
    serve(lambda: float(step(ids).asnumpy()))


if __name__ == "__main__":
    main(*sys.argv[1:])
