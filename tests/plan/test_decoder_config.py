"""The decoder of a planner's shape has the parameters that the planner counts."""

from dataclasses import replace

import pytest

from lockstep.errors import LockstepError
from lockstep.model import Decoder
from lockstep.plan import model_shape
from lockstep.plan.decoder_config import decoder_config


@pytest.mark.parametrize(
    "name", ["smollm2-135m", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"]
)
def test_parameters(name):
    """Of the whole embedding and of two layers of each kind: all layers of a kind are alike."""
    shape = model_shape(name)
    shape = replace(shape, layers=min(shape.layers, shape.dense_layers + 2))
    matrices = [p for p in Decoder(decoder_config(shape, 4096)).parameters() if p.dim() > 1]
    assert sum(p.numel() for p in matrices) == pytest.approx(shape.parameters, rel=1e-9)


def test_gpt_is_refused():
    with pytest.raises(LockstepError, match="can be planned for, but not trained here"):
        decoder_config(model_shape("gpt2"), 1024)


def test_sizes_of_no_decoder_are_refused():
    shape = replace(model_shape("llama3-1b"), head_dim=63)
    with pytest.raises(LockstepError, match="model llama3-1b: head_dim 63 must be even"):
        decoder_config(shape, 1024)
