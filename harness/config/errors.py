"""The wording of configuration errors: full dotted path, given value, expected value, the nearest known key.

A value with `${ENV}` is shown as written, never expanded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollstream.producers.rollout.user_code import failed_imports_hint
from rollstream.schemas.algorithms import BUILT_IN
from rollstream.schemas.config import COMPONENT_SECTIONS
from rollstream.schemas.errors import keys_at, unknown_key

_TAG_AT = dict.fromkeys(COMPONENT_SECTIONS, 2) | {"workflow": 1}
"""Index, by section, at which pydantic inserts the tag of a union of blocks into the path."""
_FORMS_AT = 4
"""Index of the tags of `agents`: trajectory_builders, X, the block's tag, `agents`, this one."""
_ALGORITHMS_AT = (4, 6)
"""Indices of the algorithm's tag: trainer_adapters, X, the block's tag, [`model_groups`, X,] `algorithm`, this one."""
_MAX_SHOWN = 60
_NO_MAPPING = ("model_type", "model_attributes_type", "dict_type")
_MAIN_KEYS = {"model": "path", "engine": "kind", "algorithm": "name", "reward_function": "name", "dataset": "file_path"}
"""Keys that a block's value is meant for if it is written without them."""


def explain(error: ValidationError, model: type[BaseModel], written: Mapping[str, Any]) -> str:
    """One line for the first error, and the number of further ones.

    `written` is the file before `${ENV}` is expanded. An unknown key comes first, because the key that it was meant to
    be is then reported missing.
    """
    errors = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    first = _explain_one(errors[0], model, written)
    return first if len(errors) == 1 else f"{first} (and {len(errors) - 1} more)"


def _explain_one(error: ErrorDetails, model: type[BaseModel], written: Mapping[str, Any]) -> str:
    path = _without_tags(error["loc"])
    location = ".".join(str(part) for part in path)
    if error["type"] == "extra_forbidden":
        algorithm = BUILT_IN.get(_algorithm_of(error["loc"]))
        if algorithm is None:
            return f"{location}: {unknown_key(path, model)}"
        having = [name for name, other in BUILT_IN.items() if path[-1] in other.model_fields]
        known = f"unknown key; only {', '.join(having)} of the algorithms have it" if having else None
        return f"{location}: {known or unknown_key(path[-1:], algorithm)}"
    if error["type"] == "missing":
        return f"{location}: missing; this key is required"
    if error["type"] == "union_tag_invalid":
        return f"{location}._type: {_unknown_type(error.get('ctx', {}))}"
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    if error["type"] in _NO_MAPPING:
        message = _mapping_wanted(path, _value_at(written, path), model)
    if error["type"] == "value_error":
        return f"{location}: {message}" if location else message
    return f"{location}: is {_shown(_value_at(written, path))}; {message[0].lower()}{message[1:]}"


def _mapping_wanted(path: Sequence[str | int], value: Any, model: type[BaseModel]) -> str:
    """Message for a value that is not a mapping, with the key that it is likely meant for."""
    keys = keys_at(model, path)
    key = _MAIN_KEYS.get(str(path[-1])) if path else None
    if isinstance(value, bool) and "enabled" in keys:
        key = "enabled"
    if value is None and path and path[-1] == "algorithm":
        return f"expected a mapping; give its name, one of {', '.join(BUILT_IN)}, and that algorithm's keys"
    if key is None or value is None or (isinstance(value, bool) and key != "enabled"):
        return f"expected a mapping of {', '.join(keys)}" if keys else "expected a mapping of keys"
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"expected a mapping; write `{path[-1]}: {{{key}: {shown}}}`"


def _unknown_type(context: Mapping[str, Any]) -> str:
    """The unknown type, the known ones, and packages that failed to import and may provide it."""
    known = sorted(tag.strip("'") for tag in context["expected_tags"].split(", "))
    failed = failed_imports_hint()
    return f"{context['tag']!r} is not known; known types: {', '.join(known)}{failed}"


def _without_tags(loc: Sequence[str | int]) -> list[str | int]:
    tags_at = {_TAG_AT.get(str(loc[0])), _algorithm_at(loc)} if loc else set[int | None]()
    if len(loc) > _FORMS_AT and (loc[0], loc[_FORMS_AT - 1]) == ("trajectory_builders", "agents"):
        tags_at.add(_FORMS_AT)
    return [part for index, part in enumerate(loc) if index not in tags_at]


def _algorithm_of(loc: Sequence[str | int]) -> str:
    """Tag of the union of algorithms that a path of pydantic's leads through; empty if it leads through none."""
    location = _algorithm_at(loc)
    return "" if location is None else str(loc[location])


def _algorithm_at(loc: Sequence[str | int]) -> int | None:
    is_adapter = bool(loc) and loc[0] == "trainer_adapters"
    found = (at for at in _ALGORITHMS_AT if is_adapter and len(loc) > at and loc[at - 1] == "algorithm")
    return next(found, None)


def _value_at(written: Any, path: Sequence[str | int]) -> Any:
    value = written
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return value
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
