"""Evaluators of the file as reward functions: the final answer of a rollout in, a number out.

What an evaluator asks of a model stands in `llm_judge`; which evaluators a run uses is decided in the harness.
"""

import difflib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from pydantic import JsonValue, ValidationError

from rollstream.producers import registry
from rollstream.producers.rewards import FinishedRollout, NoScoreError, Recorder, RewardError, RewardFunction
from rollstream.schemas.environment import conceal, expand
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import (
    MODELS,
    PLACE,
    Evaluator,
    ExactMatch,
    JsonSchemaMatch,
    LlmJudge,
    NumericMatch,
    PythonScore,
    RegexMatch,
)
from rollstream.schemas.settings import RolloutSettings

WORKFLOW_END = "WORKFLOW_END"
"""NAT's type of the step that says what a whole workflow answered."""
SECRET_KEYS = ("base_url", "api_key", "model", "prompt")
"""Of a judge's block: what may come from `${ENV}` and must not be told."""
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
"""A number with its sign; a sign right after a word or a bracket is an operator."""
_SIGNED_CURRENCY = re.compile(r"([-+])[$€£¥](?=[0-9.])")
_FENCED = re.compile(r"\A```[^\n]*\n(.*?)\n?```\Z", re.DOTALL)


class Chosen(NamedTuple):
    """A reward function and what errors call it."""

    place: str
    function: RewardFunction


def reward_of(name: str, settings: RolloutSettings, environ: Mapping[str, str], recorder: Recorder | None) -> Chosen:
    """The reward function called `name`: an evaluator that the settings carry, else a registered one.

    `recorder`: takes down what a judge is asked; none: no judge may be asked. Raises ConfigError.
    """
    block = settings.evaluators.get(name)
    if block is None:
        return Chosen(name, registry.reward(name))
    place = f"{PLACE}.{name}"
    config = read(name, block, environ)
    if isinstance(config, LlmJudge):
        from rollstream.producers.llm_judge import Judge

        if recorder is None:
            raise ConfigError(f"{place}: an llm_judge is not asked again; its recorded scores stay")
        hide = functools.partial(_hide, block={key: block.get(key) for key in SECRET_KEYS}, environ=environ)
        return Chosen(place, Judge(name, config, recorder, hide).score)
    return Chosen(place, _BUILDERS[type(config)](place, config))


def read(name: str, block: Mapping[str, JsonValue], environ: Mapping[str, str]) -> Evaluator:
    """The configuration of an evaluator, `${ENV}` expanded. Raises ConfigError naming the path in the file."""
    place = f"{PLACE}.{name}"
    kind = block.get("_type")
    model = MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise ConfigError(
            f"{place}._type: {kind!r} is not known; known are: {', '.join(sorted(MODELS))}; "
            "or name a registered reward function"
        )
    try:
        return model.model_validate(expand(dict(block), environ, place))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"unknown key{_hint(path, [field.alias or key for key, field in model.model_fields.items()])}"
        where = f"{place}.{path}: " if path else f"{place}."
        raise ConfigError(where + conceal(message[:1].lower() + message[1:], dict(block), environ)) from error


def check(name: str, block: Mapping[str, JsonValue], environ: Mapping[str, str] = os.environ) -> Evaluator:
    """Build an evaluator as producers will, but for asking anybody. Returns its configuration; raises ConfigError."""
    config = read(name, block, environ)
    if not isinstance(config, LlmJudge):
        _BUILDERS[type(config)](f"{PLACE}.{name}", config)
    return config


# ---- what is looked at ----


def final_answer(place: str, rollout: FinishedRollout, agent: str | None = None) -> str:
    """The text that a rollout came to: what its workflow returned, else what the agent said last.

    `agent`: whose answer; none: that of whoever answered last. Raises NoScoreError if there is none.
    """
    for step in reversed(rollout.steps):
        if agent is None and step.event_type == WORKFLOW_END and (step.data or {}).get("output") is not None:
            return _text((step.data or {})["output"])
        if step.event_type == "LLM_END" and agent in (None, step.agent):
            said = rollout.messages.get(step.agent, ())
            if said and said[-1].get("role") == "assistant" and said[-1].get("content") is not None:
                return _text(said[-1]["content"])
            if (step.data or {}).get("output") is not None:
                return _text((step.data or {})["output"])
    whose = f"agent {agent}" if agent else "any agent"
    raise NoScoreError(f"{place}: the rollout has no answer of {whose} to score (it ended as {rollout.stop_reason!r})")


def right_answer(place: str, rollout: FinishedRollout, key: str, field: str = "answer_key") -> Any:
    """What the example's inputs have under a key. Raises RewardError naming the path in the file."""
    if key not in rollout.inputs:
        known = ", ".join(rollout.inputs) or "none"
        raise RewardError(f"{place}.{field}: the example's inputs have no {key!r}; they have: {known}")
    return rollout.inputs[key]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- evaluators ----


def _exact_match(place: str, config: ExactMatch) -> RewardFunction:
    def score(rollout: FinishedRollout) -> float:
        answer = _text(right_answer(place, rollout, config.answer_key))
        return float(_plain(final_answer(place, rollout, config.agent), config) == _plain(answer, config))

    return score


def _plain(text: str, config: ExactMatch) -> str:
    text = {"strip": text.strip, "collapse": lambda: " ".join(text.split()), "exact": lambda: text}[config.whitespace]()
    return text.casefold() if config.ignore_case else text


def _numeric_match(place: str, config: NumericMatch) -> RewardFunction:
    def score(rollout: FinishedRollout) -> float:
        given = right_answer(place, rollout, config.answer_key)
        right = numbers(_text(given))
        if not right or isinstance(given, bool):
            raise RewardError(f"{place}.answer_key: the answer {_text(given)!r} of the example has no number in it")
        found = numbers(final_answer(place, rollout, config.agent))
        if not found or (config.take == "only" and len(found) > 1):
            return 0.0
        number = found[0 if config.take == "first" else -1]
        return float(abs(number - right[-1]) <= config.tolerance)

    return score


def numbers(text: str) -> list[float]:
    """The finite numbers in a text, in its order. `1,234` is one number, `5-3` are two, `-$5` is -5."""
    plain = _SIGNED_CURRENCY.sub(r"\1", text.replace("\N{MINUS SIGN}", "-"))
    found = (float(match.replace(",", "")) for match in _NUMBER.findall(plain))
    return [number for number in found if math.isfinite(number)]


def _regex(place: str, config: RegexMatch) -> RewardFunction:
    pattern = re.compile(config.pattern, re.IGNORECASE if config.ignore_case else 0)

    def score(rollout: FinishedRollout) -> float:
        right = None
        if config.answer_key is not None:
            right = _text(right_answer(place, rollout, config.answer_key)).strip()
        match = pattern.search(final_answer(place, rollout, config.agent))
        if match is None or right is None:
            return float(match is not None)
        taken = (match[config.group] or "").strip()
        return float(taken.casefold() == right.casefold() if config.ignore_case else taken == right)

    return score


def _json_schema(place: str, config: JsonSchemaMatch) -> RewardFunction:
    import referencing
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    schema = config.document if config.document is not None else read_schema(place, str(config.file))
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"{place}.schema: {error.json_path}: {error.message}") from error
    validator = kind(schema, registry=referencing.Registry())  # an empty one: nothing is fetched

    def score(rollout: FinishedRollout) -> float:
        text = final_answer(place, rollout, config.agent).strip()
        fenced = _FENCED.match(text)
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return 0.0
        return float(validator.is_valid(value))

    return score


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def read_schema(place: str, file: str) -> dict[str, JsonValue]:
    """The JSON object in a file. Raises ConfigError."""
    try:
        with open(file, encoding="utf-8") as stream:
            found = json.load(stream)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}.file: {file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{place}.file: {file} must hold a JSON object")
    return found


def _python(place: str, config: PythonScore) -> RewardFunction:
    try:
        return registry.reward(f"{registry.PYTHON}{config.function}")
    except ConfigError as error:
        raise ConfigError(f"{place}.function: {error}") from error


_BUILDERS: dict[type[Any], Callable[[str, Any], RewardFunction]] = {
    ExactMatch: _exact_match,
    NumericMatch: _numeric_match,
    RegexMatch: _regex,
    JsonSchemaMatch: _json_schema,
    PythonScore: _python,
}


def _hide(text: str, *, block: dict[str, JsonValue], environ: Mapping[str, str]) -> str:
    hidden = conceal(text, block, environ)
    return conceal(hidden, block, {name: value.strip() for name, value in environ.items()})


def _hint(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known are: {', '.join(sorted(known))}"
