"""Request bodies, as OpenAI's public schema has them, with the sampling options that other engines added.

Strict: a wrong type or an unknown key is an error. A key that OpenAI has and that changes nothing here (`user`,
`store`, ...) is accepted; one that would change the answer and is not offered is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character: send valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=2**31)]
FIRST = Field(fail_fast=True)
"""Of a long list the first mistake is enough: an error for each of a million items would take minutes to write down."""
Ids = Annotated[list[TokenId], Field(min_length=1), FIRST]
MESSAGES = 2048
"""That a conversation may have, as at OpenAI."""


def json_object(text: str) -> str:
    """The text, which is a JSON object; ValueError otherwise."""
    try:
        found = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        found = False
    if not found:
        raise ValueError("is not a JSON object: send the arguments as the model gave them")
    return text


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: Annotated[Text, Field(min_length=1, max_length=64)]
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Output follows the schema in any case."""


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Structured(Body):
    """The form of the output; vLLM's names. Exactly one."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[Text, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None

    def fields(self) -> dict[str, Any]:
        # Not without every null: a schema may ask for one.
        return {name: value for name, value in self.model_dump(by_alias=True).items() if value is not None}

    @model_validator(mode="after")
    def _one(self) -> Structured:
        if len(self.fields()) != 1:
            raise ValueError("must have exactly one of json, json_object, regex, choice and grammar")
        return self


class Sampling(Body):
    """What text and chat completions have in common. null means the default everywhere."""

    model: Text
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[Text, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=2**16)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16), FIRST] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | None, Field(discriminator="type")] = (
        None
    )
    user: Text | None = None
    # Not OpenAI's:
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    structured_outputs: Structured | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    """Add `token_ids` and `prompt_token_ids` to each choice: text does not identify tokens."""
    cache_salt: Text | None = None
    """Share cached prefixes only with requests that send the same salt."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Smaller goes first."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which the request ends with an error."""

    @model_validator(mode="after")
    def _bias_keys(self) -> Sampling:
        wrong = next((key for key in self.logit_bias or {} if not (key.isascii() and key.isdigit())), None)
        if wrong is not None or any(len(key) > 10 for key in self.logit_bias or {}):
            raise ValueError("logit_bias maps token ids, written as strings of digits, to numbers")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true; remove it or set stream")
        if self.structured_outputs is not None and not isinstance(self.response_format, TextFormat | None):
            raise ValueError("response_format and structured_outputs both say what the output looks like: give one")
        return self


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=1024), FIRST]
        | Annotated[list[Ids], Field(min_length=1, max_length=1024), FIRST]
    )
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of must be at least n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError("best_of above n cannot be streamed: the best are known at the end; set stream to false")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError(
                "max_tokens is 0, which asks for nothing: give at least 1, or set echo to score the prompt"
            )
        return self


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Function(Body):
    """A function that the model may call; parameters is a JSON schema."""

    name: Annotated[Text, Field(min_length=1, max_length=64)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {key: value for key, value in given.items() if value is not None}


class Tool(Body):
    type: Literal["function"]
    function: Function


class Called(Body):
    name: Text
    arguments: Text
    """A JSON object, as text."""

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        return json_object(text)


class ToolCall(Body):
    id: Text
    type: Literal["function"]
    function: Called
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: with its arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    """One message. Images and audio are not offered."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1), FIRST] | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    # Clients send back whole answers, with everything that was not in them.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Text | None = None
    """What it thought. Templates of models that think may show it to them again."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("has tool_calls, which only an assistant's message can have: remove them")
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise ValueError("has no content: give a text")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: text parts joined, `developer` as the `system` that templates know."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message if self.name is None else {**message, "name": self.name}


class FunctionName(Body):
    name: Text


class NamedTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


def _no_names_of_ours(variables: dict[str, Any]) -> dict[str, Any]:
    ours = _OURS.intersection(variables)
    if ours:
        raise ValueError(f"sets {min(ours)}, which the request gives in its own way: remove it")
    return variables


_OURS = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
Variables = Annotated[dict[str, Any], AfterValidator(_no_names_of_ours)]
"""What a chat template may read beside the messages, such as enable_thinking."""


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES), FIRST]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[Text, Text] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    modalities: list[Literal["text"]] | None = None
    # OpenAI's that are not offered: clients send null for what they do not use.
    audio: None = None
    function_call: None = None
    functions: None = None
    prediction: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    # Not OpenAI's:
    chat_template_kwargs: Variables | None = None

    @property
    def forced(self) -> list[str]:
        """Of which tools one must be called; none: the model decides."""
        choice = self.tool_choice
        return [choice.function.name] if isinstance(choice, NamedTool) else self.names if choice == "required" else []

    @property
    def names(self) -> list[str]:
        """Of the tools that may be called."""
        return [tool["function"]["name"] for tool in self.offered or ()]

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them; None without any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [{"type": "function", "function": tool.function.shown()} for tool in self.tools]

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true; set it")
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        formed = self.structured_outputs is not None or not isinstance(self.response_format, TextFormat | None)
        check_forced(wanted, [tool.function.name for tool in self.tools or ()], formed)
        return self


def check_forced(wanted: str | None, names: Sequence[str], formed: bool) -> None:
    """ValueError for a tool_choice that no call can follow. formed: the output has another form already."""
    if wanted in (None, "none", "auto"):
        return
    if not names or (wanted != "required" and wanted not in names):
        raise ValueError("tool_choice asks for a call of a function that tools does not have: add it to tools")
    if formed:
        raise ValueError("tool_choice asks for a call, and the request for another form of output: give one of them")


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    model: Text
    input: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=2048), FIRST]
        | Annotated[list[Ids], Field(min_length=1, max_length=2048), FIRST]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Text | None = None
    # Not OpenAI's:
    pooling: Literal["mean", "last"] | None = None
    """Of the final hidden states; the mean where not given."""
    normalize: bool | None = None
    """Scale each vector to length 1; true where not given."""

    @model_validator(mode="after")
    def _whole(self) -> EmbeddingRequest:
        if self.dimensions is not None:
            raise ValueError("dimensions is not offered: this model's embeddings cannot be shortened; remove it")
        return self


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages under the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES), FIRST] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: Variables | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], FIRST]


class WeightsRequest(Body):
    """POST /v1/weights."""

    path: Text
    """A model directory, a .gguf file or an alias, as the server sees it."""


class Error(BaseModel):
    """What went wrong, as OpenAI writes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer other than 200."""

    error: Error
