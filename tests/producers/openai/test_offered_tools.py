"""Tools of responses as functions of a chat, and calls as items; what is wrong with them is refused by its place."""

from typing import Any

import pytest

from rollstream.producers.openai import offered_tools, responses
from rollstream.producers.openai.offered_tools import OfferedTool
from rollstream.producers.openai.requests import Refusal

ASK: dict[str, Any] = {"model": "policy", "input": "a"}
RUN = {"type": "function", "name": "run"}
SHELL = {"type": "namespace", "name": "shell", "tools": [RUN, {"type": "custom", "name": "exec"}]}


def offered_of(*tools: Any) -> Any:
    return offered_tools.named(OfferedTool.model_validate(tool) for tool in tools)


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_names_within_namespaces_are_apart_from_others_and_a_later_tool_replaces_one_of_its_name():
    older = {**RUN, "description": "older"}
    found = offered_of(older, SHELL, {"type": "web_search", "name": "run"}, {**SHELL, "tools": [older]}, RUN)
    tools = [(one.name, one.namespace, one.tool.type, one.tool.description) for one in found.values()]
    assert tools == [
        ("shell.exec", "shell", "custom", None),
        ("run", None, "web_search", None),
        ("shell.run", "shell", "function", "older"),
        ("run", None, "function", None),
    ]


@pytest.mark.parametrize(
    ("made", "item"),
    [
        (call("run", '{"a":1}'), {"type": "function_call", "name": "run", "arguments": '{"a":1}'}),
        (call("shell.run", "{}"), {"type": "function_call", "name": "run", "namespace": "shell", "arguments": "{}"}),
        (
            call("shell.exec", '{"input":"x = 1"}'),
            {"type": "custom_tool_call", "name": "exec", "namespace": "shell", "input": "x = 1"},
        ),
    ],
)
def test_a_call_given_back_as_its_item_is_the_call_that_the_model_made(made, item):
    found = offered_tools.item_of(made, offered_of(RUN, SHELL))
    assert {key: found[key] for key in item} == item
    assert found.keys() - item.keys() == {"id", "status", "call_id"}
    assert offered_tools.call_of(found) == made


def test_a_call_of_a_tool_that_was_not_offered_and_one_without_its_input_are_given_as_they_were_written():
    offered = offered_of(SHELL)
    assert offered_tools.item_of(call("shell.rm", "{}"), offered)["name"] == "shell.rm"
    for arguments in ('{"code":"x"}', '{"input":1}', "[]", "x ="):
        assert offered_tools.item_of(call("shell.exec", arguments), offered)["input"] == arguments


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "namespace", "tools": [RUN]}], "the namespace has no name; add it"),
        ([{"type": "custom"}], "the custom has no name; add it"),
        ([{**SHELL, "tools": [{"type": "function"}]}], "the function has no name; add it"),
        ([{**SHELL, "tools": "run"}], "list"),
    ],
)
def test_a_tool_without_its_parts_is_refused_also_within_a_namespace(tools, message):
    with pytest.raises(Refusal, match=message) as refused:
        responses.parse(ASK | {"tools": tools})
    assert (refused.value.status, str(refused.value.param)[:7]) == (400, "tools.0")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "custom_tool_call", "name": "exec", "call_id": "c"}, "has a name and input as text"),
        ({"type": "custom_tool_call", "input": "x", "call_id": "c"}, "has a name and input as text"),
        ({"type": "function_call", "name": "run", "input": "x"}, "has a name and arguments as text"),
        ({"type": "function_call", "name": "run", "arguments": "{}", "namespace": 3}, "namespace must be a text"),
    ],
)
def test_a_call_that_is_given_back_without_its_parts_is_refused(item, message):
    with pytest.raises(Refusal, match=message) as refused:
        responses.parse(ASK | {"input": [item]}).chat()
    assert (refused.value.status, refused.value.param) == (400, "input.0")


def test_a_choice_of_a_tool_within_a_namespace_has_to_name_one():
    chosen = {"type": "function", "name": "run", "namespace": "shell"}
    assert responses.parse(ASK | {"tools": [SHELL], "tool_choice": chosen}).chat().model_extra
    with pytest.raises(Refusal, match=r"tool 'clock\.run' is not one of tools"):
        responses.parse(ASK | {"tools": [SHELL], "tool_choice": chosen | {"namespace": "clock"}}).chat()
