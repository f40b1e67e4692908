"""Evaluators of the file as reward functions: the final answer of a rollout in, a number out.

What an evaluator asks of a model is in `judge`.
"""

import decimal
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import JsonValue

from rollstream.producers.evaluators import matching
from rollstream.producers.rollout.reply import content_text, text_of
from rollstream.producers.rollout.rewards import FinishedRollout, NoScoreError, RewardError, RewardFunction
from rollstream.producers.rollout.scored_answers import is_call
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import (
    Evaluator,
    ExactMatch,
    JsonSchemaMatch,
    NumericMatch,
    RegexMatch,
)

WORKFLOW_END = "WORKFLOW_END"
"""NAT's type of the step that says what a whole workflow answered."""
FINAL_ANSWER = "####"
"""Mark of GSM8K between the steps of an answer and its number."""
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
"""A number with its sign; a sign right after a word or a bracket is an operator."""
METASCHEMAS = ("http://json-schema.org/", "https://json-schema.org/")
"""Beginnings of the names of JSON schema's own schemas, which are at hand."""
DEFINITIONS = ("$defs", "definitions")
"""Keys of a JSON schema whose subschemas apply only where something refers to them."""
_MAX_DIGITS = 10_000
"""Bound of the digits and the exponent of a number that is compared."""
_EXACT = decimal.Context(prec=4 * _MAX_DIGITS, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
"""In which no difference of two such numbers is rounded."""
_SIGNED_CURRENCY = re.compile(r"([-+])[$€£¥](?=[0-9.])")
_FENCED = re.compile(r"\A```[^\n]*\n(.*?)\n?```\Z", re.DOTALL)


# ---- what is looked at ----


def final_answer(location: str, rollout: FinishedRollout, agent: str | None = None) -> str:
    """The text that a rollout came to: what its workflow returned, else what the agent's client got last.

    `agent`: whose answer; None: that of the agent that answered last. Raises NoScoreError if there is none, or if the
    workflow returned null.
    """
    for step in reversed(rollout.steps):
        data = step.data or {}
        output = data.get("output")
        if agent is None and step.event_type == WORKFLOW_END and "output" in data:
            return _result(location, output)
        if is_call(step) and agent in (None, step.agent):
            messages = rollout.messages.get(step.agent, ())
            content = messages[-1].get("content") if messages and messages[-1].get("role") == "assistant" else None
            text = None if content is None else content_text(content)
            if text is not None:
                return text
            if (found := content if output is None else output) is not None:
                return _text(found)
    whose = f"agent {agent}" if agent else "any agent"
    raise NoScoreError(
        f"{location}: the rollout has no answer by {whose} to score (it ended as {rollout.stop_reason!r}); "
        "have it answer before it ends"
    )


def _result(location: str, output: Any) -> str:
    """The text of a workflow's result. Raises NoScoreError for null, which the agent's last text does not replace."""
    if output is None:
        raise NoScoreError(
            f"{location}: the workflow's result is null; have the workflow return a value, or correct "
            "result_json_path if it has one"
        )
    return _text(output)


def _text(output: Any) -> str:
    """Text parts as one text, and anything else as `text_of` has it."""
    text = content_text(output)
    return text_of(output) if text is None else text


def right_answer(location: str, rollout: FinishedRollout, key: str, field: str = "answer_key") -> Any:
    """The value of a key in the example's inputs. Raises RewardError naming the path in the file."""
    if key not in rollout.inputs:
        known = ", ".join(rollout.inputs) or "none"
        raise RewardError(f"{location}.{field}: the example's inputs have no key {key!r}; name one of: {known}")
    return rollout.inputs[key]


def check_answer(location: str, config: Evaluator, answer: Any) -> None:
    """Raises RewardError naming the location of a right answer with which no response can be compared."""
    if answer is None:
        raise RewardError(f"{location}: the answer of the example is null; add it, or leave the example out")
    if isinstance(config, NumericMatch):
        _number(location, answer)


# ---- evaluators ----


def _exact_match(location: str, config: ExactMatch) -> RewardFunction:
    def score(rollout: FinishedRollout) -> float:
        answer = text_of(right_answer(location, rollout, config.answer_key))
        return float(_plain(final_answer(location, rollout, config.agent), config) == _plain(answer, config))

    return score


def _plain(text: str, config: ExactMatch) -> str:
    text = {"strip": text.strip, "collapse": lambda: " ".join(text.split()), "exact": lambda: text}[config.whitespace]()
    return text.casefold() if config.ignore_case else text


def _numeric_match(location: str, config: NumericMatch) -> RewardFunction:
    def score(rollout: FinishedRollout) -> float:
        right = _number(f"{location}.answer_key", right_answer(location, rollout, config.answer_key))
        found = numbers(final_answer(location, rollout, config.agent))
        if not found or (config.take == "only" and len(found) > 1):
            return 0.0
        number = found[0 if config.take == "first" else -1]
        return float(_EXACT.subtract(number, right).copy_abs() <= decimal.Decimal(repr(config.tolerance)))

    return score


def _number(location: str, answer: Any) -> decimal.Decimal:
    """The number of a right answer. Raises RewardError."""
    right = numbers(text_of(answer).rpartition(FINAL_ANSWER)[2])
    if len(right) != 1 or isinstance(answer, bool):
        count = "no number" if not right or isinstance(answer, bool) else f"{len(right)} numbers"
        raise RewardError(
            f"{location}: the answer {text_of(answer)!r} of the example contains {count}; correct it "
            f"(behind {FINAL_ANSWER}, if it has one, is the answer), or name another key"
        )
    return right[0]


def numbers(text: str) -> list[decimal.Decimal]:
    """The numbers in a text, in its order, without those of more than 10,000 digits or beyond 1e10000.

    `1,234` is one number, `5-3` are two, `-$5` is -5.
    """
    plain = _SIGNED_CURRENCY.sub(r"\1", text.replace("\N{MINUS SIGN}", "-"))
    found = (_exact(match.replace(",", "")) for match in _NUMBER.findall(plain))
    return [number for number in found if number is not None]


def _exact(text: str) -> decimal.Decimal | None:
    """The decimal number; None if it is too long or too large."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > _MAX_DIGITS:
        return None
    sign, power = exponent[:1] == "-", exponent.lstrip("+-").lstrip("0")
    if len(power) <= 5 and (number := decimal.Decimal(text)).adjusted() <= _MAX_DIGITS:
        return number if number and number.adjusted() >= -_MAX_DIGITS else decimal.Decimal(0)
    return decimal.Decimal(0) if sign or not decimal.Decimal(mantissa) else None


def _regex(location: str, config: RegexMatch) -> RewardFunction:
    def score(rollout: FinishedRollout) -> float:
        right = None
        if config.answer_key is not None:
            right = text_of(right_answer(location, rollout, config.answer_key)).strip()
        text = final_answer(location, rollout, config.agent)
        is_found, took = matching.search(
            location, config.pattern, text, ignore_case=config.ignore_case, group=config.group
        )
        if not is_found or right is None:
            return float(is_found)
        taken = (took or "").strip()
        return float(taken.casefold() == right.casefold() if config.ignore_case else taken == right)

    return score


def _json_schema(location: str, config: JsonSchemaMatch) -> RewardFunction:
    schema = config.document if config.document is not None else read_schema(location, str(config.file))

    def score(rollout: FinishedRollout) -> float:
        text = final_answer(location, rollout, config.agent).strip()
        fenced = _FENCED.match(text)
        return float(matching.is_valid_json(location, schema, fenced[1] if fenced else text))

    return score


def check_schema(location: str, config: JsonSchemaMatch) -> None:
    """Raises ConfigError for a value that is not a JSON schema."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    schema = _schema_of(location, config)
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"{location}.schema: {error.json_path}: {error.message}; correct it") from error


def _schema_of(location: str, config: JsonSchemaMatch) -> dict[str, JsonValue]:
    return config.document if config.document is not None else read_schema(location, str(config.file))


def check_references(location: str, config: JsonSchemaMatch) -> None:
    """Raises ConfigError for a reference that cannot be resolved within the schema, as scoring fetches nothing.

    Definitions are left out: nothing may refer to one.
    """
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root: Resource[Any] = Resource.from_contents(_schema_of(location, config), default_specification=DRAFT202012)
    registry: Registry[Any] = Registry()
    found = [(root, registry.resolver_with_root(root))]
    while found:
        resource, resolver = found.pop()
        contents = resource.contents
        if not isinstance(contents, dict):
            continue
        named = contents.get("$ref")
        try:
            if isinstance(named, str) and not named.startswith(METASCHEMAS):
                resolver.lookup(named)
        except Unresolvable as error:
            raise ConfigError(
                f"{location}.schema: $ref {named!r} is not in the schema, and no other is fetched; "
                "correct it, or add what it names under $defs"
            ) from error
        except Exception:  # noqa: BLE001 -- a pointer that this library cannot follow: scoring says what is wrong
            continue
        with suppress(Exception):  # of a form that this library does not know
            apart = [one for key in DEFINITIONS if isinstance(of := contents.get(key), dict) for one in of.values()]
            within = [one for one in resource.subresources() if not any(one.contents is other for other in apart)]
            found += [(one, resolver.in_subresource(one)) for one in within]


def read_schema(location: str, file: str) -> dict[str, JsonValue]:
    """The JSON object in a file. Raises ConfigError."""
    try:
        with open(os.path.expanduser(file), encoding="utf-8") as stream:
            found = json.load(stream)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{location}.file: {file} cannot be read: {error}; correct its path or permissions"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{location}.file: {file} must contain a JSON object; correct the file")
    return found


BUILDERS: dict[type[Any], Callable[[str, Any], RewardFunction]] = {
    ExactMatch: _exact_match,
    NumericMatch: _numeric_match,
    RegexMatch: _regex,
    JsonSchemaMatch: _json_schema,
}
"""Reward function of a configuration, by its class; the first argument is its place in the file."""
