"""The closed form against the model that is really trained: bytes that autograd keeps for one layer."""

import pytest
import torch

from lockstep.config import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.ops import Packed, operators
from lockstep.plan import Batch, Layout, ModelShape
from lockstep.plan.columns import layout_columns
from lockstep.plan.kept_bytes import layer_bytes

TOKENS = 256


def kept(layers: int, numerics: str) -> int:
    """Bytes of distinct storages, parameters left out, that the forward pass saves for the backward."""
    config = ModelConfig(
        vocab_size=64, hidden_size=128, intermediate_size=352, num_layers=layers, num_heads=4, num_kv_heads=2,
        head_dim=32, max_positions=TOKENS,
    )  # fmt: skip
    decoder = Decoder(config).to_empty(device="cpu")
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = decoder(operators(numerics), torch.arange(TOKENS) % 64, Packed.of([TOKENS]), dtype=torch.bfloat16)
    assert out.shape == (TOKENS, 128)
    return sum(t.untyped_storage().nbytes() for pointer, t in seen.items() if pointer not in own)


@pytest.mark.parametrize("numerics", ["bitwise"])
def test_one_layer_within_five_per_cent(numerics):
    real = kept(3, numerics) - kept(2, numerics)
    shape = ModelShape("tiny", 2, 128, 4, 64, intermediate=352, kv_heads=2, head_dim=32, gated=True)
    rows = layout_columns(shape, [Layout()], Batch(1, TOKENS))
    assert layer_bytes(rows)[0] == pytest.approx(real, rel=0.05)
