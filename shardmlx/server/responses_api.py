"""OpenAI's Responses API: requests and replies. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shardmlx.inference.answer_format import Tool
from shardmlx.server.accepted_fields import Body, Json, Listed, words
from shardmlx.server.answer_parts import AnswerPart, Kind
from shardmlx.server.chat_request import (
    CHOICES,
    AnswerOptions,
    ApiRequest,
    ChatRequest,
    ServedModel,
    ToolChoice,
    choice_refused,
)
from shardmlx.server.client_tools import FIELDS, ClientTool, OfferedTool, tools_in
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.openai_messages import History
from shardmlx.server.replies import BlockReply
from shardmlx.server.request_bodies import (
    AskedChat,
    StreamOptions,
    TokenLimit,
    in_an_object,
    read_body,
)
from shardmlx.server.request_queue import Delta
from shardmlx.server.responses_items import add_item
from shardmlx.server.structure import ResponseFormatBody, Structure

REPEATED: Json = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
"""Fields that each response says again, as they hold where they are not given."""


def _in_items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


INCLUDABLE = words("""
    reasoning.encrypted_content file_search_call.results web_search_call.results
    web_search_call.action.sources message.input_image.image_url
    computer_call_output.output.image_url code_interpreter_call.outputs
""")
"""Names of further fields that a client may ask for, though no response here has them."""


def _includable(wanted: list[str] | None) -> list[str] | None:
    for each in wanted or ():
        if each not in INCLUDABLE:
            raise ValueError(f"{shown(each)} is not supported by this server: leave it out")
    return wanted


class TextBody(Body):
    """The ``text`` of a request."""

    format: ResponseFormatBody | None = None

    passes = frozenset({"verbosity"})

    @property
    def structure(self) -> Structure | None:
        """The structure that an answer must have, if any. Raises ``ApiError``."""
        return None if self.format is None else self.format.structure("text.format")


class ReasoningBody(Body):
    """The ``reasoning`` of a request."""

    effort: str | None = None

    passes = frozenset({"summary", "generate_summary"})
    neutral: ClassVar = {"context": ("auto",), "mode": ("standard",)}


class ChosenTool(Body):
    """A tool that a choice names."""

    type: str
    name: str | None = None
    namespace: str | None = None

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError`` for a field that is not known, and for a tool of another kind."""
        super().refuse_unknown(where)
        if self.type not in FIELDS:
            kind = shown(self.type)
            raise refused(f"{where}: a tool of type {kind} is not understood here", where)

    @property
    def in_chat(self) -> str:
        """The name of its function in a chat."""
        return ClientTool(self.type, self.name or self.type, self.namespace or None).in_chat


class ResponseChoice(ChosenTool):
    """The ``tool_choice`` of a request; a word alone is its ``type``."""

    mode: Literal["auto", "required"] = "auto"
    tools: Listed[ChosenTool] = Field(default_factory=list)

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError``, for a field at any depth that is not known, or another type."""
        if self.type not in (*CHOICES, *FIELDS, "allowed_tools"):
            raise choice_refused(self.type)
        Body.refuse_unknown(self, where)

    @property
    def choice(self) -> ToolChoice:
        """The choice of tools that is asked for."""
        if self.type == "allowed_tools":
            names = [tool.in_chat for tool in self.tools]
            return ToolChoice(only=names, must=self.mode == "required")
        if self.type in FIELDS:
            return ToolChoice(named=self.in_chat)
        return CHOICES[self.type]


class ResponseBody(AskedChat):
    """The body of a request to /v1/responses."""

    input: Annotated[Listed[Json], BeforeValidator(_in_items)]
    instructions: str = ""
    max_output_tokens: TokenLimit = None
    tools: Listed[OfferedTool] = Field(default_factory=list)
    tool_choice: Annotated[ResponseChoice | None, BeforeValidator(in_an_object)] = None
    parallel_tool_calls: bool | None = None
    text: TextBody = Field(default_factory=TextBody)
    reasoning: ReasoningBody = Field(default_factory=ReasoningBody)
    stream_options: StreamOptions | None = None
    include: Annotated[Listed[str] | None, AfterValidator(_includable)] = None

    @property
    def repeated(self) -> Json:
        """The fields that a response says again, as they were given."""
        given = self.model_dump(include=set(REPEATED), exclude_unset=True, exclude_none=True)
        choice = given.get("tool_choice")
        if choice is not None and choice.keys() == {"type"}:
            given["tool_choice"] = choice["type"]
        return REPEATED | given


def read_response(body: bytes, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/responses. Raises ``ApiError``."""
    asked = read_body(ResponseBody, body, served.names)
    history = History()
    if asked.instructions:
        history.add("system", asked.instructions)
    offered = list(asked.tools)
    for at, item in enumerate(asked.input):
        where = f"input.{at}"
        add_item(history, where, item)
        if item.get("type") in ("tool_search_output", "additional_tools"):
            offered += tools_in(item, where)
    tools: dict[str, ClientTool] = {}
    functions: dict[str, Tool] = {}
    for tool, function in (pair for each in offered for pair in each.functions()):
        tools.setdefault(tool.in_chat, tool)
        functions.setdefault(tool.in_chat, function)
    options = AnswerOptions(
        sampling=asked,
        prompt_field="input",
        most=asked.max_output_tokens,
        most_field="max_output_tokens",
        stream=bool(asked.stream),
    )
    request = ChatRequest(
        options=options,
        messages=history.messages,
        tools=list(functions.values()),
        choice=ToolChoice() if asked.tool_choice is None else asked.tool_choice.choice,
        parallel=asked.parallel_tool_calls is not False,
        in_pieces=False,  # an item tells which kind of tool it is for, and some take texts
        arguments=asked.template_arguments(asked.reasoning.effort),
        structure=asked.text.structure,
    )
    return replace(request.read(served), repeated=asked.repeated, client_tools=tools)


# Replies.

PREFIXES: Mapping[Kind, str] = {"thought": "rs", "said": "msg", "call": "fc"}

ITEMS: Mapping[Kind, Json] = {
    "thought": {"type": "reasoning", "summary": []},
    "said": {"type": "message", "role": "assistant"},
}

CONTENTS: Mapping[Kind, Json] = {
    "thought": {"type": "reasoning_text"},
    "said": {"type": "output_text", "annotations": [], "logprobs": []},
}
"""Contents of items, beside their texts."""


TOLD: Mapping[str, tuple[str, str]] = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
    "tool_search_call": ("", ""),
}
"""The events that tell what a call is given, and the field of its item that has it; none tell it of
the last."""


class ResponseReply(BlockReply):
    """The reply to one request to /v1/responses: each block is an item of its output."""

    _status = "in_progress"
    _events = 0
    _thought = 0
    _cut: int | None = None

    def event(self, body: Json) -> bytes:
        """Return an event with its number in the stream."""
        numbered = {"sequence_number": self._events, **body}
        self._events += 1
        return super().event(numbered)

    @property
    def sign_of_life(self) -> bytes:
        """An event that says once more that the response is in progress."""
        # Codex counts no comments, and some clients refuse events that they do not know.
        return self.event(
            {"type": "response.in_progress", "response": {**self.whole, "output": []}}
        )

    def failure(self, error: ApiError) -> Json:
        """Return the error as a body, or as the event that ends a stream."""
        if not self.request.stream:
            return error.body
        return {"type": "error", "code": error.code, "message": str(error), "param": error.param}

    def opening(self) -> Iterator[Json]:
        """Yield ``response.created`` and ``response.in_progress``."""
        yield {"type": "response.created", "response": self.whole}
        yield {"type": "response.in_progress", "response": self.whole}

    def closing(self) -> Iterator[Json]:
        """Yield the event of the end, with the whole response."""
        yield {"type": f"response.{self._status}", "response": self.whole}

    @property
    def whole(self) -> Json:
        """The response, as far as it has come."""
        is_cut = self._status == "incomplete"
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block, at) for at, block in enumerate(self.blocks[0])],
            **self.request.repeated,
            "store": False,
            "usage": None if self._status == "in_progress" else self._usage,
        }

    @property
    def _usage(self) -> Json:
        (last,) = self.last
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": last.cached},
            "output_tokens": last.generated,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": self.prompt_tokens + last.generated,
        }

    def _add(self, index: int, delta: Delta) -> Iterator[Json]:
        if any(part.kind == "thought" for part in delta.parts):
            self._thought = delta.generated
        yield from super()._add(index, delta)

    def _begun(self, block: AnswerPart) -> Iterator[Json]:
        if block.kind == "call":
            return  # all is told at its end
        item = {**self._item(replace(block, text="")), "status": "in_progress"}
        yield self._event("output_item.added", item={**item, "content": []})
        yield self._of_content("content_part.added", part=item["content"][0])

    def _more(self, part: AnswerPart) -> Iterator[Json]:
        if part.kind != "call":
            yield self._of_text("delta", part.kind, delta=part.text)

    def _ended(self, block: AnswerPart, *, is_cut: bool) -> Iterator[Json]:
        if is_cut:
            self._cut = self._last
        item = self._item(block)
        if block.kind != "call":
            yield self._of_text("done", block.kind, text=block.text)
            yield self._of_content("content_part.done", part=item["content"][0])
        else:
            begun = {**item, "status": "in_progress"}
            event, field = TOLD[item["type"]]
            yield self._event("output_item.added", item={**begun, field: ""} if field else begun)
            if field:
                yield self._of_item(f"{event}.delta", delta=item[field])
                yield self._of_item(f"{event}.done", **{"name": item["name"], field: item[field]})
        yield self._event("output_item.done", item=item)

    def _end(self, delta: Delta) -> Iterator[Json]:
        self._status = "incomplete" if delta.finish_reason == "length" else "completed"
        yield from ()

    def _tool(self, call: AnswerPart) -> ClientTool:
        return self.request.client_tools.get(call.name) or ClientTool("function", call.name)

    def _item(self, block: AnswerPart, at: int | None = None) -> Json:
        """Return the item that block ``at`` is, or the last one."""
        place = self._last if at is None else at
        status = "incomplete" if place == self._cut else "completed"
        head = {"id": self._item_id(block.kind, at), "status": status}
        if block.kind != "call":
            content = {**CONTENTS[block.kind], "text": block.text}
            return {**head, **ITEMS[block.kind], "content": [content]}
        tool = self._tool(block)
        kind = "custom_tool_call" if tool.kind == "custom" else f"{tool.kind}_call"
        return {**head, "type": kind, "call_id": block.id, **tool.called(block.text)}

    def _item_id(self, kind: Kind, at: int | None = None) -> str:
        return f"{PREFIXES[kind]}_{self.id}_{self._last if at is None else at}"

    @property
    def _last(self) -> int:
        return len(self.blocks[0]) - 1

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": f"response.{kind}", "output_index": self._last, **more}

    def _of_item(self, kind: str, **more: Any) -> Json:
        return self._event(kind, item_id=self._item_id(self.blocks[0][-1].kind), **more)

    def _of_content(self, kind: str, **more: Any) -> Json:
        return self._of_item(kind, content_index=0, **more)

    def _of_text(self, what: str, kind: Kind, **more: Any) -> Json:
        content = CONTENTS[kind]
        if "logprobs" in content:
            more["logprobs"] = []
        return self._of_content(f"{content['type']}.{what}", **more)
