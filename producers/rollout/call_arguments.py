"""Arguments of tool calls: as the model wrote them, and as objects for chat templates, with integers of any size. Pure.

orjson reads integers of more than 64 bits as floats and cannot write them, so no record holds them as numbers. There
they stay within a text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

_LONG = re.compile(r"\d{19}")
_WHITE = re.compile(r"[ \t\n\r]*")
_MAX_DEPTH = 200
"""Arguments of more levels stay a text: orjson writes 254."""
TOO_DEEP = "values are nested too deeply; make them flatter"
_TEXTS = json.JSONDecoder(parse_int=str, parse_float=str)


def is_long(text: str) -> bool:
    """Whether a JSON text may hold an integer of more than 64 bits."""
    return _LONG.search(text) is not None


def loads(text: str) -> Any:
    """The JSON value of a text. Raises ValueError."""
    if not is_long(text):
        return orjson.loads(text)
    try:
        value = json.loads(text, parse_float=orjson.loads, parse_constant=orjson.loads)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    return value


def dumps(value: Any, *, sort_keys: bool = False) -> str:
    """A JSON value as text. Raises TypeError or ValueError."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None).decode()
    except TypeError:  # an integer of more than 64 bits, or no JSON
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, allow_nan=False)
        text.encode()
        return text


def member(text: str, name: str) -> str | None:
    """The value of a name in a JSON object, as it is written there; None without one. `text`: what `loads` takes.

    Raises ValueError for values that are nested too deeply.
    """
    found, at = None, text.index("{") + 1
    try:
        while text[at := _after_white(text, at)] != "}":
            at = _after_white(text, at + 1) if text[at] == "," else at
            key, at = _TEXTS.raw_decode(text, at)
            begin = _after_white(text, _after_white(text, at) + 1)
            _, at = _TEXTS.raw_decode(text, begin)
            found = text[begin:at] if key == name else found
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    return found


def _after_white(text: str, at: int) -> int:
    match = _WHITE.match(text, at)
    assert match is not None
    return match.end()


def with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, if they are JSON that a record can hold."""
    converted = with_exact_arguments(call)
    if converted is call or not _has_long(call):
        return converted
    try:
        orjson.dumps(converted)
    except TypeError:
        return call
    return converted


def with_exact_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, if they are JSON that is not nested too deeply for a record."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    try:
        arguments = loads(text)
    except ValueError:
        return call
    if text.count("{") + text.count("[") > _MAX_DEPTH and _is_deep(arguments):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [value for values in inner for value in values]
        if not level:
            return False
    return True


def as_javascript(value: Any) -> Any:
    """A JSON value with numbers as JavaScript and Go read them, all as float64: 5.0 is 5, and large integers are
    rounded.
    """
    if isinstance(value, dict):
        return {name: as_javascript(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_javascript(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        rounded = float(value)
    except OverflowError:
        return value
    return int(rounded) if rounded.is_integer() else rounded


def for_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recorded messages as a chat template gets them: arguments that no record can hold are objects, too."""
    return [_with_exact_calls(message) if "tool_calls" in message else message for message in messages]


def _with_exact_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(map(_has_long, calls)):
        return message
    return {**message, "tool_calls": [with_exact_arguments(call) if _has_long(call) else call for call in calls]}


def _has_long(call: Any) -> bool:
    """Whether the arguments of a call are a text that may hold an integer of more than 64 bits."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return isinstance(arguments, str) and is_long(arguments)
