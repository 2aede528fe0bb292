"""Training steps of `transformers`: SDPA attention, PyTorch's fused AdamW, eager or compiled.

    python transformers_train.py MODEL_DIRECTORY TOKENS.npy DTYPE eager|compile LEARNING_RATE

Stands alone: imports nothing of Lockstep but the protocol beside it. DTYPE is that of weights, moments and products.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from step_server import serve  # type: ignore[import-not-found]


def main(directory: str, tokens: str, dtype: str, mode: str, rate: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=float(rate), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    ids = torch.from_numpy(np.load(tokens))
    run = torch.compile(model) if mode == "compile" else model

    def step() -> float:
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    serve(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
