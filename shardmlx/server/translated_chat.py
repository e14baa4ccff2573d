"""A chat of OpenAI's API, made of a request of another one. No MLX, no MPI."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from shardmlx.inference.prompts import PromptReader
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import ApiRequest, ServedModel, read_chat

Json = dict[str, Any]


@dataclass(slots=True)
class TranslatedChat:
    """A chat that asks for the same as a request of another API.

    ``body`` are the chat's fields beside ``messages`` and ``tools``. ``names`` are what the other
    API calls its fields, and what is within them.
    """

    body: Json
    names: dict[str, str]
    messages: list[Json] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)

    def add(self, place: str, message: Json) -> None:
        """Add a message, which the request has at this ``place``."""
        self.names[f"messages.{len(self.messages)}"] = place
        self.messages.append(message)

    def add_call(self, place: str, what: str, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a call to the last message; ``what`` is the field that has its arguments."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        where = f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}"
        self.names |= {where: place, f"{where}.function": place}
        self.names[f"{where}.function.arguments"] = f"{place}.{what}"
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_tool(self, place: str, what: str, function: Json) -> None:
        """Add a function that may be called; ``what`` is the field that has its parameters."""
        where = f"tools.{len(self.tools)}.function"
        self.names |= {where: place, f"{where}.parameters": f"{place}.{what}"}
        self.tools.append({"type": "function", "function": function})

    def read(self, reader: PromptReader, served: ServedModel) -> ApiRequest:
        """Read the chat. Raises ``ApiError``, in which fields have the other API's names."""
        chat = {**self.body, "messages": self.messages, "tools": self.tools}
        try:
            request = read_chat(json.dumps(chat).encode(), reader, served)
        except ApiError as error:
            raise error.called(self.names) from None
        asks = request.structure
        return request if asks is None else replace(request, structure=self.names.get(asks, asks))
