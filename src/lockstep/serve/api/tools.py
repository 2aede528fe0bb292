"""Tool calls: read from what the model wrote, in the forms of the supported families' chat templates."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from lockstep.serve.structured import SPACE
from lockstep.serve.text import begun

_DEEPSEEK = (
    r"(?:<BEGINS>)?\s*<BEGIN>(?:function<SEP>)?(?P<name>[^\n<]*)(?:<SEP>|\n```json\n)(?P<arguments>.*?)(?:\n```)?<END>"
    r"\s*(?:<ENDS>)?"
)
"""A name and its arguments; up to V3 the arguments stand in a fenced block."""
_MARKS = {"BEGINS": "calls_begin", "BEGIN": "call_begin", "SEP": "sep", "END": "call_end", "ENDS": "calls_end"}


def _deepseek(name: str) -> str:
    """A mark as its vocabulary spells it, with full-width bars and lower blocks between the words."""
    return "<\uff5ctool\u2581" + _MARKS[name].replace("_", "\u2581") + "\uff5c>"


_FORMS = (
    # Qwen and SmolLM: JSON, or a list, between marks.
    ("<tool_call>", re.compile(r"<tool_call>(?P<json>.*?)(?:</tool_call>|\Z)", re.DOTALL)),
    (
        _deepseek("BEGINS"),
        re.compile(re.sub("<([A-Z]+)>", lambda found: _deepseek(found[1]), _DEEPSEEK), re.DOTALL),
    ),
)
"""(what it begins with, a call with `json`, or with `name` and `arguments`)"""


def parse(text: str, names: Collection[str]) -> tuple[str | None, list[dict[str, Any]]]:
    """(what was said beside the calls, the calls in OpenAI's form). names: of the tools that were offered.

    Beside the forms with marks, Llama 3 and Mistral write nothing but JSON: `{"name": ..., "parameters": {...}}` or a
    list of such. What is neither stays text.
    """
    form = next((form for mark, form in _FORMS if mark in text), None)
    if form is None:
        calls = _calls(_json(text), names)
        return (None, calls) if calls else (text, [])
    calls, kept = [], []
    at = 0
    for found in form.finditer(text):
        given = found.groupdict()
        value = {"name": given["name"], "arguments": _json(given["arguments"])} if "name" in given else given["json"]
        some = _calls(_json(value) if isinstance(value, str) else value, names)
        if some:
            calls += some
            kept.append(text[at : found.start()])
            at = found.end()
    said = "".join([*kept, text[at:]])
    return (said.rstrip() or None, calls) if calls else (text, [])


def plain(text: str) -> str:
    """The beginning of a text that is no call, and does not become one, whatever follows."""
    if text.lstrip()[:1] in ("", "{", "["):
        return ""
    ends = [_before(text, mark) for mark, _ in _FORMS]
    return text[: min(ends)].rstrip()


def grammar(functions: Sequence[dict[str, Any]], template: str, several: bool) -> str:
    """llguidance's Lark for calls of these functions and nothing else, in the form that the template teaches.

    functions: dicts with `name` and `parameters`, a JSON schema. several: more than one call may come.
    """
    opening, closing = ("<tool_call>\n", "\n</tool_call>") if "<tool_call>" in template else ("", "")
    one = f"{json.dumps(opening)} call {json.dumps(closing)}" if opening else "call"
    if several:
        one = f'{one} ("\\n" {one})*' if opening else '"[" call (", " call)* "]" | call'
    rules = [f"start: {one}", "call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        schema = {**(function.get("parameters") or {"type": "object"}), "x-guidance": SPACE}
        head = json.dumps(
            f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": ', ensure_ascii=False
        )
        rules += [f'call{i}: {head} arguments{i} "}}"', f"arguments{i}: %json {json.dumps(schema, allow_nan=False)}"]
    return "\n".join(rules)


def _before(text: str, mark: str) -> int:
    """Where the mark begins, or a part of it at the text's end; the text's length where neither does."""
    at = text.find(mark)
    if at >= 0:
        return at
    return len(text) - begun(text, mark)


def _json(text: str) -> Any:
    try:
        return json.loads(text.strip())
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
        try:
            written = json.dumps(arguments, ensure_ascii=False)
        except RecursionError:  # it could just be read
            return []
        function = {"name": one["name"], "arguments": written}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return calls
