"""The body of POST /v1/responses, and the chat request that it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from lockstep.serve.api.schema import (
    FIRST,
    MESSAGES,
    Body,
    Called,
    ChatRequest,
    Count,
    Function,
    FunctionName,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedTool,
    StreamOptions,
    Text,
    TextFormat,
    Tool,
    ToolCall,
    Variables,
    check_forced,
    json_object,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    type: Literal["input_text"]
    text: Text


class OutputText(Body):
    """A part of an answer that is sent back."""

    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Part = Annotated[InputText | OutputText, Field(discriminator="type")]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(min_length=1), FIRST]
    id: Text | None = None
    status: Status | None = None
    phase: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class FunctionCall(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: Status | None = None

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        return json_object(text)

    def call(self) -> ToolCall:
        return ToolCall(id=self.call_id, type="function", function=Called(name=self.name, arguments=self.arguments))


class FunctionCallOutput(Body):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text
    id: Text | None = None
    status: Status | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: Text


class Reasoning(Body):
    """What the model thought, sent back. Only `content` has a text here."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[Text, Field(min_length=1, max_length=64)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(FunctionName):
    """The one function that must be called."""

    type: Literal["function"]


class NamedSchemaFormat(Body):
    type: Literal["json_schema"]
    name: Annotated[Text, Field(min_length=1, max_length=64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextSettings(Body):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat | None, Field(discriminator="type")] = None
    verbosity: Literal["low", "medium", "high"] | None = None


def _kind(item: Any) -> str:
    """What an item is; a message need not say it."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model: Text
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MESSAGES), FIRST]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextSettings | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[Text, Text] | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    """Nothing is stored in any case."""
    background: Literal[False] | None = None
    previous_response_id: Text | None = None
    # OpenAI's that are not offered: clients send null for what they do not use.
    conversation: None = None
    max_tool_calls: None = None
    prompt_cache_retention: None = None
    reasoning: None = None
    # Not OpenAI's:
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    cache_salt: Text | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    chat_template_kwargs: Variables | None = None

    @model_validator(mode="after")
    def _offered(self) -> ResponsesRequest:
        if self.previous_response_id is not None:
            raise ValueError(
                "previous_response_id names a response, but this server stores none: send the conversation's items "
                "in input (what they have in common with the last request is cached)"
            )
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true; remove it or set stream")
        if not isinstance(self.input, str) and all(isinstance(item, Reasoning) for item in self.input):
            raise ValueError("input has reasoning alone: send the messages as well")
        wanted = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else self.tool_choice
        check_forced(wanted, [tool.name for tool in self.tools or ()], self._format() is not None)
        return self

    @property
    def choice(self) -> str | dict[str, Any]:
        """tool_choice as the response repeats it."""
        given = self.tool_choice or "auto"
        return given if isinstance(given, str) else given.model_dump()

    @property
    def form(self) -> dict[str, Any]:
        """The output's format as the response repeats it."""
        given = self.text.format if self.text is not None else None
        return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_unset=True)

    def chat(self) -> ChatRequest:
        """The chat request that gives the same answer."""
        scored = bool(self.include) or bool(self.top_logprobs)
        same = (
            "model", "temperature", "top_p", "seed", "top_k", "min_p", "cache_salt", "priority", "timeout", "user",
            "parallel_tool_calls", "safety_identifier", "chat_template_kwargs",
        )  # fmt: skip
        return ChatRequest(
            **{name: getattr(self, name) for name in same},
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=scored or None,
            top_logprobs=(self.top_logprobs or 0) if scored else None,
            response_format=self._format(),
            tool_choice=self._choice(),
            tools=[Tool(type="function", function=_function(tool)) for tool in self.tools] if self.tools else None,
        )

    def _choice(self) -> Any:
        choice = self.tool_choice
        return choice if isinstance(choice, str | None) else NamedTool(type="function", function=choice)

    def _format(self) -> JsonObjectFormat | JsonSchemaFormat | None:
        match self.text.format if self.text is not None else None:
            case JsonObjectFormat() as given:
                return given
            case NamedSchemaFormat() as given:
                named = JsonSchema(name=given.name, schema=given.schema_)
                return JsonSchemaFormat(type="json_schema", json_schema=named)
        return None

    def _messages(self) -> list[Message]:
        """Reasoning, a message and calls that follow each other are one message of the assistant's."""
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        turn: dict[str, Any] = {}
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            said = _said(item)
            if turn and (said is None or any(_follows(key, turn) for key in said)):
                messages.append(Message(role="assistant", **turn))
                turn = {}
            if said is not None:
                calls = {"tool_calls": turn.get("tool_calls", []) + said["tool_calls"]} if "tool_calls" in said else {}
                turn |= {**said, **calls}
            elif isinstance(item, InputMessage):
                messages.append(Message(role=item.role, content=item.text))
            elif isinstance(item, FunctionCallOutput):
                messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        return [*messages, Message(role="assistant", **turn)] if turn else messages


def _follows(key: str, turn: dict[str, Any]) -> bool:
    """Whether this part belongs to the next message of the assistant's: they come in order, and only calls repeat."""
    order = ("reasoning_content", "content", "tool_calls")
    newest = max(order.index(part) for part in turn)
    return order.index(key) < newest or (key in turn and key != "tool_calls")


def _said(item: InputMessage | FunctionCall | FunctionCallOutput | Reasoning) -> dict[str, Any] | None:
    """What an item adds to a message of the assistant's; None where it is none of them."""
    match item:
        case Reasoning():
            return {"reasoning_content": item.text} if item.text else {}
        case InputMessage(role="assistant"):
            return {"content": item.text}
        case FunctionCall():
            return {"tool_calls": [item.call()]}
    return None


def _function(tool: FunctionTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
