"""Tools that a row offers to the model, and the model's calls of them: both in the one form that chat templates take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swiftcp.data.values import parse_json, shown
from swiftcp.errors import DataError


def parse_tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None or tools == "":
        return []
    tools = parse_json(tools, "tools") if isinstance(tools, str) else tools
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"tools is {shown(tools)}: it must be a list of objects, or that list as a JSON string")
    return list(tools)


def parse_tool_calls(calls: Any, position: int) -> Iterator[dict[str, Any]]:
    calls = parse_json(calls, f"tool_calls of message {position}") if isinstance(calls, str) else calls
    if calls is not None and not isinstance(calls, list | tuple):
        raise DataError(f"message {position} has the tool_calls {shown(calls)}: it must be a list, or that list as a JSON string")
    for call in calls or []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"message {position} has the tool call {shown(call)}: it needs a name and arguments")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments, f"arguments of {function['name']} in message {position}")
        if not isinstance(arguments, dict):
            raise DataError(f"message {position} calls {function['name']} with {shown(arguments)}: arguments must be an object")
        yield {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
