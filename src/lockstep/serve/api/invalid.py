"""What is wrong with a request's body, in one sentence: the key, its value, and the change to make."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from lockstep.serve.api import schema
from lockstep.serve.api.responses_schema import ResponsesRequest

_ENDPOINTS: dict[str, type[schema.Body]] = {
    "/v1/completions": schema.CompletionRequest, "/v1/chat/completions": schema.ChatRequest,
    "/v1/responses": ResponsesRequest, "/v1/embeddings": schema.EmbeddingRequest, "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest, "/v1/weights": schema.WeightsRequest,
}  # fmt: skip
_TEXTS_OR_IDS = "give a text, a list of texts, a list of token ids, or a list of lists of token ids"
_SHAPES = {
    "prompt": _TEXTS_OR_IDS, "input": _TEXTS_OR_IDS, "stop": "give a text or a list of texts",
    "content": 'give a text, or a list of parts such as {"type": "text", "text": "..."}',
}  # fmt: skip
"""For keys that take several kinds of value."""
_KINDS = frozenset({"string_type", "list_type", "int_type", "dict_type", "model_type", "model_attributes_type"})
"""Errors that say no more than that a value is of another kind."""
_NOT_TEXT = frozenset(
    {"image_url", "input_image", "input_audio", "audio", "file", "input_file", "video_url", "refusal"}
)
"""Content parts of OpenAI's that are not offered."""

_NOT_OFFERED = frozenset(
    {
        "reasoning_effort", "reasoning", "verbosity", "audio", "prediction", "web_search_options", "functions",
        "function_call", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "conversation",
        "max_tool_calls",
    }
)  # fmt: skip
"""Parameters of OpenAI's, known in no body here or not in all."""
_NEAR = 0.75
"""How alike two names must be for a slip of the pen (`difflib`)."""

Error = dict[str, Any]


def sentence(errors: Sequence[Error], body: Any, endpoint: str) -> tuple[str, str | None, str | None]:
    """(the sentence, the key, OpenAI's code) for what pydantic found in a body that was sent to this endpoint."""
    first = _telling(errors)
    place = _place(first, body)
    path, kind = ".".join(map(str, place)), first["type"]
    if kind == "json_invalid":
        said = first.get("ctx", {}).get("error", "it cannot be parsed")
        return f"the body is not valid JSON ({said}): send one JSON object.", None, "invalid_json"
    if not place and kind in ("missing", "dict_type", "model_type", "model_attributes_type"):
        return "the body must be a JSON object, sent with Content-Type: application/json.", None, None
    if kind == "value_error":
        message = str(first["msg"]).removeprefix("Value error, ")
        return (f"{path} {message}." if place else f"{message}."), path or None, None
    if kind == "extra_forbidden":
        return _unknown(path, place, endpoint), path, "unknown_parameter"
    if kind == "missing":
        return f"{path} is missing: add it.", path, "missing_required_parameter"
    several = [error for error in errors if error["loc"][:2] == first["loc"][:2]]
    wanted = _SHAPES.get(str(place[-1])) if place and kind in _KINDS and len(several) > 1 else None
    return (
        f"{path or 'the body'} {_shown(first.get('input'))}: {wanted or _wanted(first)}.",
        path or None,
        "invalid_value",
    )


def _telling(errors: Sequence[Error]) -> Error:
    """Of the errors about the first wrong key (each way to read a union has some), the one that tells most."""
    about = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    return next((error for error in about if error["type"] not in _KINDS), errors[0])


def _place(error: Error, body: Any) -> list[str | int]:
    """Keys and indices in the body; without the names that pydantic gives to the members of a union."""
    found: list[str | int] = []
    place = [part for part in error["loc"] if part != "body"]
    for number, part in enumerate(place):
        there = isinstance(part, str) if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if there and (isinstance(part, int) or part in body):
            body = body[part]
            found.append(part)
        elif there and error["type"] == "missing" and number == len(place) - 1:
            found.append(part)
    return found


def _unknown(path: str, place: Sequence[str | int], endpoint: str) -> str:
    """A key that this body has not: the one that was meant, or where it belongs."""
    name = str(place[-1]) if place else path
    if len(place) == 1:
        others = [other for other, body in _ENDPOINTS.items() if _offers(body, name)]
        if others:
            return f"{path} is not a parameter of this endpoint but of {others[0]}: remove it, or ask there."
        if name in _NOT_OFFERED:
            return f"{path} is a parameter of OpenAI's that is not offered here: remove it."
    body = _ENDPOINTS.get(endpoint) if len(place) == 1 else None
    near = difflib.get_close_matches(name, body.model_fields if body is not None else _NAMES, 1, _NEAR)
    hint = f"did you mean {near[0]}?" if near and near[0] != name else "remove it."
    return f"{path or 'a key'} is not a parameter of this endpoint: {hint}"


def _offers(body: type[schema.Body], name: str) -> bool:
    field = body.model_fields.get(name)
    return field is not None and field.annotation is not type(None)


def _wanted(error: Error) -> str:
    context, message = error.get("ctx", {}), str(error["msg"])
    match error["type"]:
        case "literal_error" if str(error.get("input")) in _NOT_TEXT:
            return "models here read text only; send parts of type text"
        case "union_tag_invalid" if str(context.get("tag")) in _NOT_TEXT:
            return f"parts of type {context['tag']} are not offered, models here read text only; send text"
        case "union_tag_invalid" | "union_tag_not_found":
            known = context.get("expected_tags", "").replace("'", "")
            return f"its type must be {known}" if known else "give it a type"
        case "literal_error":
            return f"give {context.get('expected')}"
        case "none_required":
            return "it is not offered here; remove it"
        case "too_long":
            return f"send at most {context.get('max_length')} at once"
        case "too_short":
            return f"give at least {context.get('min_length')}"
    return message[0].lower() + message[1:]


def _shown(value: Any) -> str:
    """What was sent, short."""
    if isinstance(value, list):
        return f"is a list of {len(value)}"
    if isinstance(value, dict):
        return "is an object"
    text = json.dumps(value)
    return f"is {text if len(text) <= 60 else text[:57] + '...'}"


def _bodies(kind: type[schema.Body]) -> list[type[schema.Body]]:
    return [kind, *(more for sub in kind.__subclasses__() for more in _bodies(sub))]


_NAMES = {field.alias or name for body in _bodies(schema.Body) for name, field in body.model_fields.items()}
