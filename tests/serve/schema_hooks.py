"""Hooks for schemathesis: requests ask for the model that there is, or almost every one would end with a 404; and they
leave time for an answer, or some would end with the 408 that is promised to who asks for one within 5e-324 seconds."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body = {**body, "model": "tiny"}
        timeout = body.get("timeout")
        if isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0:
            body["timeout"] = max(timeout, 60.0)
        if body.get("encoding_format") == "base64":  # OpenAI's document says that every vector is a list of numbers
            body["encoding_format"] = "float"
    return body
