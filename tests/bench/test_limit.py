"""The limit of serving, against the trainer's own count of a forward pass."""

from __future__ import annotations

import pytest
import torch

from lockstep.bench.limit import Limit, limit_of
from lockstep.ops import Packed
from lockstep.train.data import Batch
from lockstep.train.flops import step_flops
from tests.serve.tiny import tiny_model


def test_a_prompt_and_its_answer_cost_a_forward_pass_with_logits_where_a_token_is_drawn() -> None:
    decoder, prompt, output = tiny_model().decoder, 9, 5
    rows = prompt + output - 1  # the last token that is drawn is not computed
    tokens = torch.zeros(rows, dtype=torch.int64)
    batch = Batch(tokens, tokens, Packed.of([rows]))
    limit = limit_of(decoder)
    unread = (prompt - 1) * 2 * decoder.head_weight.numel()
    assert limit.prompt(prompt) + limit.answer(prompt, output) == step_flops(decoder, [batch]) / 3 - unread


def test_few_clients_wait_for_the_weights_and_many_for_the_products() -> None:
    limit = Limit(layers=2e9, head=0.0, pair=0.0, weights=1e9, peak=1e11, bandwidth=1e10)
    one, many = limit.rate(1, 10, 11), limit.rate(100, 10, 11)
    assert one == pytest.approx(11 / (10 * 0.02 + 10 * 0.1))
    assert many == pytest.approx(1100 / (1000 * 0.02 + 1000 * 0.02))
    assert limit.rate(200, 10, 11) == pytest.approx(many)
