"""A separate process for matching that records request: regular expressions and JSON schemas, with bounds.

Python's `re` cannot be interrupted and holds the interpreter's lock, and a schema may branch without end. Here the
kernel ends the process at its limit of processor time, whether or not the process that asked is still there. Started as
a script by `matching`; one question a line of standard input, one answer a line of standard output.
"""

import collections
import contextlib
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class InvalidError(Exception):
    """A pattern or schema that means nothing; the message goes behind the place in the configuration."""


def search(pattern: str, text: str, ignore_case: bool, group: int | str) -> tuple[bool, str | None]:
    """Whether the pattern is found in the text, and the text of its group."""
    compiled = _compiled(pattern, re.IGNORECASE if ignore_case else 0)
    if group not in compiled.groupindex and group not in range(compiled.groups + 1):
        raise InvalidError(f"has no group {group!r}; add it, or name another")
    match = compiled.search(text)
    return match is not None, match[group] if match is not None else None


def last(pattern: str, text: str) -> str | None:
    """Text of the last match: of its one group, else of the whole match."""
    compiled = _compiled(pattern, 0)
    if compiled.groups > 1:
        raise InvalidError("has more than one group; use (?:...) for groups without a capture")
    matches = collections.deque(compiled.finditer(text), maxlen=1)
    return matches[0][compiled.groups] if matches else None


def is_valid(schema: str, text: str) -> bool:
    """Whether the text is JSON that the schema (JSON as well) accepts."""
    validator = _validator(schema)
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    return validator.is_valid(value)


QUESTIONS: dict[str, Callable[..., Any]] = {"search": search, "last": last, "is_valid": is_valid}


def _compiled(pattern: str, flags: int) -> "re.Pattern[str]":
    try:
        return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidError(f"is not a valid regular expression: {error}; correct it") from error


@functools.lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    import referencing
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    document = json.loads(schema)
    kind = validator_for(document, default=Draft202012Validator)
    try:
        kind.check_schema(document)
    except SchemaError as error:
        raise InvalidError(f"{error.json_path}: {error.message}; correct it") from error
    return kind(document, registry=referencing.Registry())  # an empty one: nothing is fetched


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": QUESTIONS[question.pop("ask")](**question)}
    except InvalidError as error:
        return {"invalid": str(error)}
    except Exception as error:  # noqa: BLE001 -- whatever a library raises on a record's pattern is the answer
        return {"raised": f"{type(error).__name__}: {error}"}


def main(cpu_s: float, memory_bytes: int) -> None:
    """Answer until standard input ends."""
    with contextlib.suppress(ValueError, OSError):  # not every system bounds memory so
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin:
        question = json.loads(line)
        if question["ask"] == "is_valid":
            import jsonschema  # noqa: F401 -- its import does not count as time of a question
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
        answer = json.dumps(_answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
