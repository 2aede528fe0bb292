"""The configuration of a tiny run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "max_positions": 128, "tie_embeddings": True,
}  # fmt: skip


def tiny_tree(text: Path, out: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration as a mapping; sections are merged over it."""
    tree: dict[str, Any] = {
        "model": MODEL,
        "data": {"sources": [str(text)], "seq_len": 32, "held_out": 0.1},
        "schedule": {"warmup_steps": 2},
        "train": {
            "out": str(out), "steps": 6, "micro_batch": 2, "micro_batches": 3, "dtype": "float32",
            "tensorboard": False, "save_every": 0, "eval_every": 0,
        },
    }  # fmt: skip
    return {name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree.keys() | sections.keys()}


def with_experts(family: str) -> dict[str, Any]:
    """The model section of a tiny model of this family; its first layer is dense."""
    from tests.model.tiny import CONFIGS

    from lockstep.model.hf_config import read_config

    shape = read_config(CONFIGS[family]().to_dict(), "test").model_dump()
    return {**shape, "vocab_size": 300, "num_layers": 4, "router_aux_loss": 0.0}
