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
from rollstream.schemas.errors import unknown_key

_TAG_AT = dict.fromkeys(COMPONENT_SECTIONS, 2) | {"workflow": 1}
"""Index, by section, at which pydantic inserts the tag of a union of blocks into the path."""
_FORMS_AT = 4
"""Index of the tags of `agents`: trajectory_builders, X, the block's tag, `agents`, this one."""
_ALGORITHMS_AT = (4, 6)
"""Indices of the algorithm's tag: trainer_adapters, X, the block's tag, [`model_groups`, X,] `algorithm`, this one."""
_MAX_SHOWN = 60


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
        unknown = unknown_key(path, model) if algorithm is None else unknown_key(path[-1:], algorithm)
        return f"{location}: {unknown}"
    if error["type"] == "missing":
        return f"{location}: missing; this key is required"
    if error["type"] == "union_tag_invalid":
        return f"{location}._type: {_unknown_type(error.get('ctx', {}))}"
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    if error["type"] == "value_error":
        return f"{location}: {message}" if location else message
    return f"{location}: is {_shown(_value_at(written, path))}; {message[0].lower()}{message[1:]}"


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
