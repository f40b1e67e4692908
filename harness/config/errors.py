"""The wording of configuration errors: full dotted path, given value, expected value, the nearest known key.

A value with `${ENV}` is shown as written, never expanded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollstream.producers.rollout.user_code import failed_imports_hint
from rollstream.schemas.algorithms import BUILT_IN
from rollstream.schemas.config import COMPONENT_SECTIONS
from rollstream.schemas.errors import hint

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
        known = _keys_at(model, path[:-1]) if algorithm is None else sorted(_keys(algorithm))
        return f"{location}: unknown key{_hint(str(path[-1]), known)}"
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


def _hint(key: str, known: Sequence[str]) -> str:
    return f"; {hint(key, known)}" if known else ""


def _keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Keys of the models at a path (a path may match several blocks of a union)."""
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
    """Annotations of the value at `part` inside a value of this annotation."""
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
