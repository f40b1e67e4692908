"""The wording of configuration errors: full dotted path, what is there, what is expected, the nearest known key.

A value that came from `${ENV}` is shown as it was written, never expanded.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollstream.harness import registry
from rollstream.schemas.config import COMPONENT_SECTIONS

_TAG_AT = dict.fromkeys(COMPONENT_SECTIONS, 2) | {"workflow": 1}
"""Where pydantic puts the tag of a union of blocks into the path, by section."""
_MAX_SHOWN = 60


def explain(error: ValidationError, model: type[BaseModel], written: Mapping[str, Any]) -> str:
    """One line for the first error, and how many more there are. `written` is the file before `${ENV}`.

    An unknown key comes first: what it was meant to be is missing, too.
    """
    errors = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    first = _explain_one(errors[0], model, written)
    return first if len(errors) == 1 else f"{first} (and {len(errors) - 1} more)"


def _explain_one(error: ErrorDetails, model: type[BaseModel], written: Mapping[str, Any]) -> str:
    path = _without_tags(error["loc"])
    place = ".".join(str(part) for part in path)
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key{_hint(str(path[-1]), _keys_at(model, path[:-1]))}"
    if error["type"] == "missing":
        return f"{place}: missing; it must be given"
    if error["type"] == "union_tag_invalid":
        return f"{place}._type: {_unknown_type(error.get('ctx', {}))}"
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    if error["type"] == "value_error":
        return f"{place}: {message}" if place else message
    return f"{place}: is {_shown(_value_at(written, path))}; {message[0].lower()}{message[1:]}"


def _unknown_type(context: Mapping[str, Any]) -> str:
    """What is there, what is known, and which packages could have brought it, had they been importable."""
    known = sorted(tag.strip("'") for tag in context["expected_tags"].split(", "))
    failed = "".join(f"; {name} cannot be imported: {why}" for name, why in registry.failed_imports.items())
    return f"{context['tag']!r} is not known; known are: {', '.join(known)}{failed}"


def _without_tags(loc: Sequence[str | int]) -> list[str | int]:
    tag_at = _TAG_AT.get(str(loc[0])) if loc else None
    return [part for index, part in enumerate(loc) if index != tag_at]


def _hint(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known are: {', '.join(sorted(known))}" if known else ""


def _keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Keys that the models at a path know (a path may lead to several blocks of a union)."""
    annotations: list[Any] = [model]
    for part in path:
        annotations = [inner for annotation in annotations for inner in _inside(annotation, part)]
    return sorted({key for annotation in annotations for found in _models(annotation) for key in _keys(found)})


def _keys(model: type[BaseModel]) -> Iterator[str]:
    yield from ((field.alias or name) for name, field in model.model_fields.items())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that an annotation names directly (in unions and Annotated, not in containers)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif not _is_container(annotation):
        for inner in get_args(annotation):
            yield from _models(inner)


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    """Annotations of what lies at `part` in a value of an annotation."""
    if _is_container(annotation):
        yield get_args(annotation)[-1]
        return
    for found in _models(annotation):
        for name, field in found.model_fields.items():
            if part in (name, field.alias):
                yield field.annotation


def _is_container(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (dict, list, tuple)


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
