"""Tool calls: read from what the model wrote, in the forms of the supported families' chat templates."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parse(text: str, names: Collection[str]) -> tuple[str | None, list[dict[str, Any]]]:
    """(what was said beside the calls, the calls in OpenAI's form). names: of the tools that were offered.

    Qwen and SmolLM write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a list between the marks;
    Llama 3 writes nothing but `{"name": ..., "parameters": {...}}`. What is neither stays text.
    """
    if _OPEN not in text:
        calls = _calls(_json(text.strip()), names)
        return (None, calls) if calls else (text, [])
    said, calls = "", []
    for index, part in enumerate(re.split(f"({_OPEN}.*?{_CLOSE})", text, flags=re.DOTALL)):
        found = _calls(_json(part.removeprefix(_OPEN).removesuffix(_CLOSE).strip()), names) if index % 2 else []
        calls += found
        said += "" if found else part
    return (said.strip() or None, calls) if calls else (text, [])


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls(value: Any, names: Collection[str]) -> list[dict[str, Any]]:
    """All of them, or none when one is not a call of a known tool."""
    several = value if isinstance(value, list) else [value]
    calls = []
    for one in several:
        arguments = one.get("arguments", one.get("parameters", {})) if isinstance(one, dict) else None
        if not isinstance(arguments, dict) or one.get("name") not in list(names):
            return []
        function = {"name": one["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return calls
