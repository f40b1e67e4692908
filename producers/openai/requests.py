"""Requests in OpenAI's form, and the form of a refusal. Pure."""

import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollstream.producers.openai import options
from rollstream.producers.rollout import call_arguments
from rollstream.schemas.errors import RollstreamError, first_invalid
from rollstream.schemas.settings import Sampling

SHOULD_RETRY = "x-should-retry"
"""OpenAI's and Anthropic's clients repeat a request after 409, 429 and 5xx unless this header is `false`."""
MAX_CHOICES = 128
MAX_NESTING = 64
"""Maximum nesting of lists and objects in a body: chat templates and records allow some hundred levels."""
MAX_STOPS, MAX_STOP_CHARS = 64, 1000
"""Number of stop sequences, each of which is looked for after every token, and characters of one."""

ENGINE_ERROR = "engine_error"
"""Error code for calls that an engine has failed to answer."""


class Refusal(RollstreamError):
    """A request that gets an error in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        is_final: bool = False,
    ) -> None:
        """`is_final`: the same request is refused again at any time, though its status suggests another try."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_final = is_final
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Error body in OpenAI's form."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == HTTPStatus.TOO_MANY_REQUESTS else fallback
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(BaseModel):
    """One message, its content as text; what a client adds of an earlier answer is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    content: str = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_function_call(cls, value: Any) -> Any:
        """Chat templates know neither the key nor the role: both would vanish from the prompt."""
        is_call = isinstance(value, dict) and value.get("function_call") is not None
        if is_call or (isinstance(value, dict) and value.get("role") == "function"):
            raise ValueError("function_call and the role function are not supported; use tool_calls and the role tool")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Text parts are joined by line ends."""
        if value is None:
            return ""
        if not isinstance(value, list):
            return value
        texts: list[str] = []
        for number, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"part {number} is not text; only parts of type text are supported; leave it out")
            texts.append(part["text"])
        return "\n".join(texts)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: roles that they know, arguments of tool calls as objects."""
        message = self.model_dump(exclude_none=True)
        message["role"] = "system" if self.role == "developer" else self.role
        if self.tool_calls is not None:
            message["tool_calls"] = [call_arguments.with_object_arguments(call) for call in self.tool_calls]
        return message


class StreamOptions(BaseModel):
    """Options for the end of a stream."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    include_usage: bool = False


class WithoutNulls(BaseModel):
    """Null means the default: clients write out the options that were not set."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class SampledRequest(WithoutNulls):
    """Fields of every request. Unknown keys are refused: no option is lost in silence."""

    model_config = ConfigDict(frozen=True, extra="allow")
    PROMPT_KEY: ClassVar[str]
    """The key whose value the prompt is made of."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    """None: as the trained model is sampled, else 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Not OpenAI's; 0 means no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: tuple[str, ...] = Field(default=(), max_length=MAX_STOPS)
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    min_version: int | None = Field(default=None, ge=0)
    """Not OpenAI's: the answer waits for this weight version."""

    @field_validator("stop", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("a stop sequence must not be empty")
        if any(len(word) > MAX_STOP_CHARS for word in value):
            raise ValueError(f"a stop sequence has more than {MAX_STOP_CHARS} characters; give its beginning")
        return value

    def sampling(self, default_max_new_tokens: int, trained_at: float | None = None) -> Sampling:
        """Sampling settings of the request. `trained_at`: the only temperature that is accepted.

        Raises Refusal (400) for another one.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        if trained_at is not None:
            if self.temperature is not None and not math.isclose(temperature, trained_at, rel_tol=1e-6):
                raise Refusal(
                    400,
                    f"temperature: {temperature:g} differs from {trained_at:g}, the temperature that the loss "
                    f"assumes for answers of model {self.model!r}, so its ratios would be wrong; remove temperature, "
                    f"or "
                    f"train with algorithm.temperature: {temperature:g}",
                    param="temperature",
                    code="unsupported_value",
                )
            temperature = trained_at
        limit = self.max_completion_tokens or self.max_tokens or default_max_new_tokens
        return Sampling(temperature=temperature, top_p=self.top_p, top_k=self.top_k, max_new_tokens=limit)

    def deviations(self, sampling: Sampling) -> dict[str, Any]:
        """Options in the request that a run's settings do not allow: they are recorded and not followed."""
        wanted: dict[str, Any] = {}
        for key in sorted({"temperature", "top_p", "top_k"} & self.model_fields_set):
            value = getattr(self, key)
            if value is not None and value != getattr(sampling, key):
                wanted[key] = value
        limit = self.max_completion_tokens or self.max_tokens
        wanted |= {"max_tokens": limit} if limit is not None and limit > sampling.max_new_tokens else {}
        wanted |= {"seed": self.seed} if self.seed is not None else {}
        return wanted | options.unmet(self.model_extra or {})

    def check_tool_choice(self) -> None:
        """Raises Refusal (400) for a choice that no server knows, or of a tool that the request does not offer."""

    def check_enforced(self) -> None:
        """Raises Refusal (400) for an option that would have to constrain the sampled tokens."""
        key = options.unenforced(self.model_extra or {})
        if key is not None:
            value = repr((self.model_extra or {})[key])[:100]
            raise Refusal(
                400,
                f"{key}: {value} is not supported here, because sampling is not constrained; remove it",
                param=key,
                code="unsupported_value",
            )


def _of_sampled(number: int) -> int:
    if number > 1:
        raise ValueError(
            f"{number}: the log-probability of the sampled token alone is known; give 1 or 0, or leave it out"
        )
    return number


NumLogprobs = Annotated[int, Field(ge=0), AfterValidator(_of_sampled)]
"""Tokens at each position whose log-probabilities are asked for."""


class ChatRequest(SampledRequest):
    """A request for chat completions."""

    PROMPT_KEY: ClassVar[str] = "messages"
    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    tools: list[dict[str, Any]] = Field(default_factory=list)

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools in the model's prompt, which are functions; None if there are none."""
        is_off = (self.model_extra or {}).get("tool_choice") == "none"
        functions = [tool for tool in self.tools if options.is_function(tool)]
        return functions if functions and not is_off else None

    def check_tool_choice(self) -> None:
        """See `SampledRequest`."""
        choice = (self.model_extra or {}).get("tool_choice", "auto")
        if (wrong := options.wrong_tool_choice(choice, self.tools)) is not None:
            raise Refusal(400, f"tool_choice: {wrong}", param="tool_choice", code="invalid_value")

    def deviations(self, sampling: Sampling) -> dict[str, Any]:
        """See `SampledRequest`; also tools that the prompt does not offer."""
        others = options.left_out(self.tools)
        return super().deviations(sampling) | ({"tools": others} if others else {})


_M = TypeVar("_M", bound=BaseModel)
_R = TypeVar("_R", bound=SampledRequest)


def parse_request(body: bytes) -> ChatRequest:
    """The chat request in a body. Raises Refusal (400) that names the first wrong key."""
    return checked_request(ChatRequest, json_of(body))


def json_of(body: bytes, exact: str = "") -> Any:
    """The value in a body. `exact`: a key of it below which integers of more than 64 bits are kept.

    Raises Refusal (400), also for values within values that no record could hold.
    """
    try:
        value = _exact(body.decode(), exact) if exact else orjson.loads(body)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}; send a JSON object") from error
    level = [value]
    for _ in range(MAX_NESTING):
        level = [item for one in level if isinstance(one, dict | list) for item in _items(one)]
        if not level:
            return value
    raise Refusal(400, f"the body nests values more than {MAX_NESTING} deep; make it flatter")


def _exact(text: str, key: str) -> Any:
    value = call_arguments.loads(text)
    if not isinstance(value, dict) or not call_arguments.is_long(text):
        return value
    return {name: item if name == key else orjson.loads(call_arguments.dumps(item)) for name, item in value.items()}


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def validated(kind: type[_M], value: Any) -> _M:
    """The value as a model. Raises Refusal (400) that names the first wrong key."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        param, message = first_invalid(error)
        is_unknown = error.errors(include_url=False, include_input=False)[0]["type"] == "extra_forbidden"
        message, code = ("unknown parameter; remove it", "unknown_parameter") if is_unknown else (message, None)
        raise Refusal(400, f"{param or 'the body'}: {message}", param=param or None, code=code) from error


def checked_request(kind: type[_R], value: Any) -> _R:
    """The value as a request, without keys that would be ignored. Raises Refusal (400)."""
    request = validated(kind, value)
    for key, value in (request.model_extra or {}).items():
        if key not in options.KNOWN:
            raise Refusal(400, f"{key}: unknown parameter; remove it", param=key, code="unknown_parameter")
        if value not in options.ONLY_NEUTRAL.get(key, (value,)):
            raise Refusal(
                400, f"{key}: {value!r} is not supported here; remove it", param=key, code="unsupported_value"
            )
    request.check_tool_choice()
    return request
