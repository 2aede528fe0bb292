"""What the log says of a request."""

from __future__ import annotations

import logging
import re

import pytest
from starlette.testclient import TestClient

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("traceparent", "label"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", f"mine trace={TRACE}"),
        (f"01-{TRACE}-00f067aa0ba902b7-01-later", f"mine trace={TRACE}"),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", "mine"),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", "mine"),
        (f"00-{TRACE}-x", "mine"),
        ("", "mine"),
    ],
)
def test_every_line_of_a_request_has_its_id_and_its_trace(
    knowing: TestClient, caplog: pytest.LogCaptureFixture, traceparent: str, label: str
) -> None:
    asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "seed": 4}
    with caplog.at_level(logging.INFO, "lockstep.serve"):
        answer = knowing.post(
            "/v1/completions", json=asked, headers={"x-request-id": "mine", "traceparent": traceparent}
        )
    first, second = (record.getMessage() for record in caplog.records if record.name == "lockstep.serve")
    assert first == f"{label} is {answer.json()['id']}: 3 prompt tokens, seed 4"
    assert re.fullmatch(re.escape(label) + r" POST /v1/completions 200 \d+\.\d{3}s", second)
