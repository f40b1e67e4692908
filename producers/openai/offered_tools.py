"""Tools of a response as the model is offered them, and its calls as the items that the client knows. Pure.

Chat templates know functions only. A tool within a namespace is offered as `NAMESPACE.NAME`, a custom tool as a
function whose one argument is its input. Tools that a provider would run or know by itself are not offered.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
FUNCTION_CALL, CUSTOM_CALL = "function_call", "custom_tool_call"
"""Types of the items of calls."""
OUTPUTS = ("function_call_output", "custom_tool_call_output")
INPUT = "input"
"""The argument that a custom tool has."""
_TEXT_INPUT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


class OfferedTool(BaseModel):
    """A tool of the client, a namespace of some, or another type, which the provider would run or know by itself."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    """Format of a custom tool's input; nothing holds the model to it."""
    tools: list[Self] = Field(default_factory=list)
    """Tools of a namespace."""

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if self.type in (FUNCTION, CUSTOM, NAMESPACE) and not self.name:
            raise ValueError(f"the {self.type} has no name; add it")
        return self


class NamedTool(NamedTuple):
    """A tool by the name that the model calls it by."""

    name: str
    tool: OfferedTool
    namespace: str | None

    @property
    def key(self) -> tuple[bool, str]:
        """A later tool with the same one takes its place."""
        is_called = self.tool.type in (FUNCTION, CUSTOM)
        return is_called, self.name if is_called else f"{self.tool.type} {self.name}"

    def as_function(self) -> dict[str, Any]:
        """The tool as chat completions and chat templates expect it; a provider's tool as its type and name alone."""
        kind, description = self.tool.type, self.tool.description or ""
        if kind not in (FUNCTION, CUSTOM):
            return {"type": kind, "name": self.name}
        parameters = self.tool.parameters or {}
        if kind == CUSTOM:
            parameters = _TEXT_INPUT
            definition = (self.tool.format or {}).get("definition")
            description += f"\n\nGrammar of {INPUT}:\n{definition}" if isinstance(definition, str) else ""
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": FUNCTION, "function": function}

    def item_of(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call of it, as the client knows the tool."""
        is_custom, arguments = self.tool.type == CUSTOM, call["function"]["arguments"]
        given = {INPUT: _input_of(arguments)} if is_custom else {"arguments": arguments}
        within = {} if self.namespace is None else {"namespace": self.namespace}
        return {
            "id": f"{'ctc' if is_custom else 'fc'}_{call['id'].removeprefix('call_')}",
            "type": CUSTOM_CALL if is_custom else FUNCTION_CALL,
            "status": "completed",
            "call_id": call["id"],
            "name": self.tool.name,
            **within,
            **given,
        }


def named(tools: Iterable[OfferedTool]) -> dict[tuple[bool, str], NamedTool]:
    """Tools with those of namespaces, by key; a later one comes last, in place of an earlier one of its key."""
    found: dict[tuple[bool, str], NamedTool] = {}
    for tool in tools:
        members = [(one, tool.name) for one in tool.tools] if tool.type == NAMESPACE else [(tool, None)]
        for one, namespace in members:
            new = NamedTool(full_name(one.name, namespace), one, namespace)
            found.pop(new.key, None)
            found[new.key] = new
    return found


def item_of(call: Mapping[str, Any], offered: Mapping[tuple[bool, str], NamedTool]) -> dict[str, Any]:
    """A call that the model made as an item; of a name that was not offered, a call of a function of that name."""
    name = call["function"]["name"]
    known = offered.get((True, name)) or NamedTool(name, OfferedTool.model_construct(type=FUNCTION, name=name), None)
    return known.item_of(call)


def call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call that a client gives back, as chat completions have it. Raises ValueError for one without its parts."""
    is_custom, name, namespace = item.get("type") == CUSTOM_CALL, item.get("name"), item.get("namespace")
    given = item.get(INPUT if is_custom else "arguments")
    if not isinstance(name, str) or not isinstance(given, str):
        raise ValueError(f"a {item.get('type')} has a name and {INPUT if is_custom else 'arguments'} as text")
    if namespace is not None and not isinstance(namespace, str):
        raise ValueError("namespace must be a text")
    arguments = orjson.dumps({INPUT: given}).decode() if is_custom else given
    function = {"name": full_name(name, namespace), "arguments": arguments}
    return {"id": str(item.get("call_id", "")), "type": FUNCTION, "function": function}


def as_given(calls: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Calls that the model made as a client can give them back: of a custom tool it knows the input alone.

    `tools`: as chat templates have them.
    """
    functions = [function for tool in tools if isinstance(function := tool.get("function"), Mapping)]
    custom = [function.get("name") for function in functions if function.get("parameters") == _TEXT_INPUT]
    found: list[Mapping[str, Any]] = []
    for call in calls:
        function = call["function"]
        if function["name"] in custom:
            arguments = orjson.dumps({INPUT: _input_of(function["arguments"])}).decode()
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return found


def choice_of(choice: Any) -> Any:
    """A `tool_choice` with the names that the model has."""
    if not isinstance(choice, Mapping) or not isinstance(choice.get("namespace"), str):
        return choice
    rest = {key: value for key, value in choice.items() if key != "namespace"}
    return rest | {"name": full_name(str(choice.get("name", "")), choice["namespace"])}


def full_name(name: str, namespace: str | None) -> str:
    """Name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def _input_of(arguments: str) -> str:
    """The input in a custom tool's arguments; what is none is given as it was written."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    given = found.get(INPUT) if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments
