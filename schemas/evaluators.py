"""`eval`: its dataset, and in `eval.evaluators` the built-in evaluators, which score a rollout by its final answer.

Values only, as the file has them after `${ENV}`; what they do is in `producers/evaluators`. Blocks of other
types are others' and no matter here.
"""

import re
from typing import Any, Literal

from pydantic import Field, FiniteFloat, JsonValue, StrictBool, ValidationInfo, field_validator, model_validator

from rollstream.schemas.base import UserPath
from rollstream.schemas.kafka import Secret
from rollstream.schemas.permissions import CODE, code_of
from rollstream.schemas.settings import Settings

SECTION = "eval.evaluators"
"""Path of the evaluators in the file."""
PLACEHOLDER = re.compile(r"\{(question|answer|response)\}")
"""A placeholder in a judge's prompt; any other brace is text."""
UNCOMPILED = {"compiles_patterns": False}
"""Validation context for blocks from records: their patterns are compiled where time is bounded (`producers.matching`).
"""


class _Evaluator(Settings):
    agent: str | None = None
    """Agent whose answer is scored; None: the agent that answered last."""


class _AgainstAnswer(_Evaluator):
    answer_key: str = "answer"
    """Key of the right answer in the example's inputs."""


class ExactMatch(_AgainstAnswer):
    """1 if the response is the answer, else 0."""

    type: Literal["exact_match"] = Field(default="exact_match", alias="_type")
    ignore_case: bool = False
    whitespace: Literal["strip", "collapse", "exact"] = "strip"
    """strip: ignore whitespace at both ends; collapse: also its amount between words; exact: compare all of it."""


class NumericMatch(_AgainstAnswer):
    """1 if a number of the response is the answer's within the tolerance, else 0.

    An answer has one number; of one that shows its steps, as in GSM8K, the text behind `####` counts.
    """

    type: Literal["numeric_match"] = Field(default="numeric_match", alias="_type")
    tolerance: float = Field(default=1e-9, ge=0, allow_inf_nan=False)
    """Largest absolute difference."""
    take: Literal["last", "first", "only"] = "last"
    """The number of a response that counts; `only`: a response with several numbers is wrong."""


class RegexMatch(_Evaluator):
    """1 if the pattern is found in the response (and its group is the answer, if there is an `answer_key`), else 0."""

    type: Literal["regex"] = Field(default="regex", alias="_type")
    pattern: str
    group: int | str = 0
    """Number or name of the group that is compared; 0: all that the pattern takes."""
    answer_key: str | None = None
    """None: it is only to match."""
    ignore_case: bool = False

    @model_validator(mode="after")
    def _has_group(self, info: ValidationInfo) -> "RegexMatch":
        if info.context == UNCOMPILED:
            return self
        found = _compiled("pattern", self.pattern)
        if isinstance(self.group, str) and self.group not in found.groupindex:
            raise ValueError(f"group: the pattern has no group {self.group!r}; add it, or name another")
        if isinstance(self.group, int) and not 0 <= self.group <= found.groups:
            raise ValueError(
                f"group: the pattern has {found.groups} groups, not {self.group}; give one of "
                "them, or 0 for the whole match"
            )
        return self


class JsonSchemaMatch(_Evaluator):
    """1 if the response is JSON (alone, or in a fenced block) that the schema accepts, else 0."""

    type: Literal["json_schema"] = Field(default="json_schema", alias="_type")
    document: dict[str, JsonValue] | None = Field(default=None, alias="schema")
    file: str | None = None
    """A JSON file with the schema, instead of it."""

    @model_validator(mode="after")
    def _is_one(self) -> "JsonSchemaMatch":
        if (self.document is None) == (self.file is None):
            raise ValueError("schema: neither or both of schema and file are given; give one of them")
        return self


class PythonScore(Settings):
    """A user function that scores a finished rollout."""

    type: Literal["python"] = Field(default="python", alias="_type")
    function: str
    """`python:module.function`, also without `python:`; called as any reward function is."""
    pure: bool = False
    """It depends on the rollout alone, so a what-if may call it again."""

    @field_validator("function")
    @classmethod
    def _is_path(cls, value: str) -> str:
        named = code_of(value)
        module, _, function = named[len(CODE) :].rpartition(".")
        if not all(part.isidentifier() for part in (*module.split("."), function)):
            raise ValueError(f"{value!r} is not a path; write {CODE}module.function")
        return named


class LlmJudge(_Evaluator):
    """The number that a model says of a response, through any OpenAI-compatible endpoint."""

    type: Literal["llm_judge"] = Field(default="llm_judge", alias="_type")
    base_url: str
    """Up to and without `/chat/completions`."""
    model: str
    api_key: Secret | None = None
    """`${ENV}`; none: no Authorization header. No repr, log or dump shows it."""
    prompt: str
    """Prompt with the placeholder {response}, and optionally {question} and {answer}."""
    question_key: str = "question"
    answer_key: str = "answer"
    pattern: str = r"-?\d+(?:\.\d+)?"
    """The last match in the judge's answer is the score: its first group if there is one, else all of it."""
    min: FiniteFloat = 0.0
    max: FiniteFloat = 1.0
    """A score outside of min..max is none. The score itself is the reward."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Timeout of one request."""
    retries: int = Field(default=2, ge=0)
    """After no answer, 408, 409, 425, 429 or 5xx."""
    retry_wait_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Before the second try; doubled before each further one."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if re.fullmatch(r"https?://[^\s/?#][^\s?#]*", value) is None:
            raise ValueError("give an http(s) address such as http://127.0.0.1:8000/v1")
        return value

    @field_validator("prompt")
    @classmethod
    def _shows_response(cls, value: str) -> str:
        if "{response}" not in value:
            raise ValueError("it must contain {response}, the placeholder of the answer to judge")
        return value

    @model_validator(mode="after")
    def _is_range(self, info: ValidationInfo) -> "LlmJudge":
        if info.context != UNCOMPILED and _compiled("pattern", self.pattern).groups > 1:
            raise ValueError(
                "pattern: use at most one group, which captures the score; (?:...) groups without a capture"
            )
        if self.min >= self.max:
            raise ValueError(f"min: {self.min:g} is not below max {self.max:g}; lower min")
        return self


Evaluator = ExactMatch | NumericMatch | RegexMatch | JsonSchemaMatch | PythonScore | LlmJudge
MODELS: dict[str, type[Evaluator]] = {
    "exact_match": ExactMatch,
    "numeric_match": NumericMatch,
    "regex": RegexMatch,
    "json_schema": JsonSchemaMatch,
    "python": PythonScore,
    "llm_judge": LlmJudge,
}
"""Configuration by `_type`."""
LONG = "rollstream_"
"""Prefix that makes an evaluator's `_type` unambiguous: other packages have evaluators of the same short names."""


def kind_of(block_type: object) -> str | None:
    """The key of `MODELS` that a `_type` means; None if the evaluator is not built in."""
    name = block_type.removeprefix(LONG) if isinstance(block_type, str) else None
    return name if name in MODELS else None


def is_pure(config: Evaluator) -> bool:
    """Whether a score depends on the recorded rollout alone, so that it can be worked out again."""
    return config.pure if isinstance(config, PythonScore) else not isinstance(config, LlmJudge)


def answer_key(config: Evaluator) -> str | None:
    """Key that an example's inputs must have; none if no right answer is needed."""
    if isinstance(config, LlmJudge):
        return config.answer_key if "{answer}" in config.prompt else None
    return None if isinstance(config, (PythonScore, JsonSchemaMatch)) else config.answer_key


def _compiled(name: str, pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{name} is not a valid regular expression: {error}; correct it") from error


class DatasetStructure(Settings):
    """Names of a dataset's columns; the standard names are added to an example's inputs."""

    disable: bool = False
    """The whole row, as JSON, is the question."""
    question_key: str = "question"
    answer_key: str = "answer"
    generated_answer_key: str = "generated_answer"
    trajectory_key: str = "intermediate_steps"
    expected_trajectory_key: str = "expected_intermediate_steps"


class FilterEntry(Settings):
    """Patterns (`*`, `?`, `[seq]`) or values by column."""

    field: dict[str, list[StrictBool | str | int | float]] = Field(default_factory=dict)


class DatasetFilter(Settings):
    """Filter of a dataset's rows: those are kept that match the allowlist and not the denylist."""

    allowlist: FilterEntry | None = None
    denylist: FilterEntry | None = None


class DatasetSection(Settings):
    """A file of examples: JSON lines, one JSON list of objects, CSV with a header, or Parquet."""

    type: Literal["json", "jsonl", "csv", "parquet"] = Field(default="jsonl", alias="_type")
    file_path: UserPath
    id_key: str = "id"
    structure: DatasetStructure = Field(default_factory=DatasetStructure)
    filter: DatasetFilter | None = None

    @model_validator(mode="before")
    @classmethod
    def _lies_here(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        found: dict[str, Any] = values  # pyright: ignore[reportUnknownVariableType]
        kind = found.get("_type")
        if kind in ("xls", "custom"):
            raise ValueError(f"_type {kind!r} is not supported; save the examples as jsonl, json, csv or parquet")
        for key in ("s3", "remote_file_path"):
            if found.get(key):
                raise ValueError(f"{key} is not supported; download the file and give its file_path")
        return {key: value for key, value in found.items() if key not in ("s3", "remote_file_path")}
