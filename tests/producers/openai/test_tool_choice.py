"""Choices of tools that a request may make."""

import json

import pytest

from rollstream.producers.openai.options import left_out
from rollstream.producers.openai.requests import Refusal, parse_request
from rollstream.producers.openai.responses import parse

ASK = [{"role": "user", "content": "3+4="}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("always", [ADD], "'always' is unknown; use 'auto', 'none', 'required' or an object that names one of tools"),
        (3, [ADD], "3 is unknown; use "),
        ({"type": "function"}, [ADD], "names no tool; use "),
        ({"type": "function", "function": {"name": "sub"}}, [ADD], "tool 'sub' is not one of tools; add it there"),
        ({"type": "function", "name": "add"}, [], "tool 'add' is not one of tools"),
        ({"type": "web_search"}, [ADD], "names no tool; use "),
        ({"type": "function", "function": {"name": [1]}}, [ADD], "names no tool; use "),
        ({"type": "function", "name": {}}, [ADD, {"type": "function", "name": {}}], "names no tool; use "),
        ({"type": "function", "name": "add"}, [{"type": "function", "name": [1]}], "tool 'add' is not one of tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [ADD, SEARCH]}, [ADD], "names no tool; use "),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, [ADD], "names no tool; use "),
        ("none", [], None),
        ("required", [ADD], None),
        ({"type": "function", "function": {"name": "add"}}, [ADD], None),
        ({"type": "function", "name": "add"}, [ADD], None),
        ({"type": "web_search"}, [ADD, SEARCH], None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD]}}, [ADD], None),
    ],
)
def test_a_tool_choice_that_no_tool_of_the_request_fits_is_refused_by_name(choice, tools, message):
    body = json.dumps({"model": "policy", "messages": ASK, "tools": tools, "tool_choice": choice}).encode()
    if message is None:
        assert (parse_request(body).model_extra or {})["tool_choice"] == choice
        return
    with pytest.raises(Refusal) as refused:
        parse_request(body)
    assert str(refused.value).startswith("tool_choice: ")
    assert message in str(refused.value)
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


def test_tools_left_out_of_the_prompt_are_named_by_type_and_name():
    chats = {"type": "custom", "custom": {"name": "patch"}}
    assert left_out([ADD, SEARCH, chats, {"type": "bash_20250124", "name": "bash"}]) == [
        "web_search",
        "custom patch",
        "bash_20250124 bash",
    ]


def test_a_choice_in_a_response_is_held_to_its_tools_alike():
    given = {"model": "policy", "input": "3+4=", "tools": [{"type": "function", "name": "add"}]}
    assert parse(given | {"tool_choice": {"type": "function", "name": "add"}}).chat().model_extra
    for name in ([1], {}, "sub"):
        with pytest.raises(Refusal, match=r"^tool_choice: ") as refused:
            parse(given | {"tool_choice": {"type": "function", "name": name}}).chat()
        assert (refused.value.status, refused.value.param) == (400, "tool_choice")
