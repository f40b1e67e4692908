"""NAT's intermediate steps as recorded steps: a span's start and end are one step, an LLM call has its tokens. Pure.

Streamed tokens and chunks are not kept: the end of their span holds the whole.

Exact tokens of an LLM step, wherever its framework or gateway has left them. Pure.

Which steps of a workflow are to be trained on: those of the target functions and the target model. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import orjson
from pydantic import JsonValue

from rollstream.producers.traces.framework_logprobs import Logprobs, read_logprobs
from rollstream.producers.traces.messages import answer_of, at, finish_reason, first, prompt_of
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.intermediate_steps import (
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepState,
    IntermediateStepType,
    InvocationNode,
)
from rollstream.schemas.events.recorded import RecordedChat, RecordedReward, RecordedStep, RecordedTokens
from rollstream.schemas.events.rollouts import FunctionAncestry

MAX_LEVELS = 200
"""Levels of lists and objects in a recorded value; what is deeper is text."""

WORKFLOW = "<workflow>"
"""NAT's name of the function that a whole workflow is."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of the calls to train on. An LLM call counts if a target function is among the functions around it."""

    target_functions: frozenset[str] = frozenset({WORKFLOW})
    target_model: str | None = None
    """Name of the model as its steps have it; none: every model."""
    candidates: str | None = None
    """Name of test-time-compute steps: their scored candidates are trained on, in place of LLM calls."""


@dataclass(slots=True)
class Functions:
    """The functions that were seen: name and caller by id."""

    nodes: dict[str, InvocationNode] = field(default_factory=dict[str, InvocationNode])

    def see(self, steps: Iterable[IntermediateStep]) -> None:
        """Note the functions that steps ran in."""
        for step in steps:
            node = step.function_ancestry
            known = self.nodes.get(node.function_id)
            if known is None or known.parent_id is None:
                self.nodes[node.function_id] = node

    def around(self, node: InvocationNode) -> frozenset[str]:
        """Names of a function and of all that called it, as far as they are known."""
        names: set[str] = set()
        seen: set[str] = set()
        at: InvocationNode | None = self.nodes.get(node.function_id, node)
        while at is not None and at.function_id not in seen:
            seen.add(at.function_id)
            names.add(at.function_name)
            if at.parent_name is not None:
                names.add(at.parent_name)
            at = self.nodes.get(at.parent_id) if at.parent_id is not None else None
        return frozenset(names)


def is_targeted(names: Iterable[str | None], around: frozenset[str], selection: Selection) -> bool:
    """Whether a call is trained on. `names`: of its model, as start and end say them, which may differ."""
    if not around & selection.target_functions:
        return False
    return selection.target_model is None or selection.target_model in set(names)


def remote_ancestry(spans: Mapping[str, "RemoteSpan"], span_id: str) -> InvocationNode:
    """Ancestry of a step of a remote workflow, which does not send it: the functions among the spans around it.

    The outermost function is called by `<workflow>`, and so is a step around which there is none.
    """
    chain: list[InvocationNode] = []
    seen: set[str] = set()
    at: str | None = span_id
    while at is not None and at in spans and at not in seen:
        seen.add(at)
        span = spans[at]
        if span.function_name is not None:
            chain.append(InvocationNode(function_id=at, function_name=span.function_name))
        at = span.parent_id
    if not chain or chain[-1].function_name != WORKFLOW:
        chain.append(InvocationNode(function_id=WORKFLOW, function_name=WORKFLOW))
    own, *callers = chain
    caller = callers[0] if callers else None
    return own.model_copy(
        update={"parent_id": caller and caller.function_id, "parent_name": caller and caller.function_name}
    )


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """A span of a remote workflow."""

    parent_id: str | None
    function_name: str | None = None
    """None if it does not belong to a function."""


NOT_TARGETED = "not_targeted"
SAMPLED = frozenset({IntermediateStepCategory.LLM, IntermediateStepCategory.TTC})
"""Spans whose answers are trained on."""
SCORE = "score"
"""Name of the reward of a scored candidate."""


class Spans:
    """The open spans of one workflow, which become recorded steps as they end."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._functions = Functions()
        self._open: dict[tuple[IntermediateStepCategory, str], IntermediateStep] = {}
        self._ended: dict[
            tuple[IntermediateStepCategory, str], tuple[IntermediateStepPayload | None, IntermediateStepPayload]
        ] = {}
        """First and last step of the spans that have ended: what comes twice counts once."""
        self._calls: dict[bytes, list[RecordedTokens]] = {}
        """Tokens of LLM calls by request and answer, for candidates that are the same."""

    def see(self, steps: Iterable[IntermediateStep]) -> None:
        """Note the functions of steps before they are read: a caller may become known only later."""
        self._functions.see(steps)

    def read(self, step: IntermediateStep) -> RecordedStep | None:
        """The recorded step that `step` completes; None for one that begins or goes on, or was read already.

        Raises DecodeError for an answer that cannot be assigned to one of several open requests.
        """
        self._functions.see([step])
        payload = step.payload
        key = (payload.event_category, payload.UUID)
        if payload.UUID and payload in self._ended.get(key, ()):
            return None
        if payload.event_state == IntermediateStepState.START:
            if not payload.UUID and key in self._open and payload.event_category in SAMPLED:
                raise DecodeError(
                    f"a second {payload.event_type.value} without a UUID before the end of the first; give the steps "
                    "of each call a UUID of their own"
                )
            self._open[key] = step
            return None
        if payload.event_state == IntermediateStepState.CHUNK:
            return None
        start = self._open.pop(key, None)
        self._ended[key] = (start.payload if start is not None else None, payload)
        if payload.event_type == IntermediateStepType.LLM_END:
            return self._call(start, step)
        if payload.event_type == IntermediateStepType.TTC_END and self._is_candidate(payload):
            return self._candidate(start, step)
        return _recorded(start, step)

    def rest(self) -> list[RecordedStep]:
        """Steps that never ended, in the order in which they began."""
        left = [_recorded(None, step) for step in self._open.values()]
        self._open.clear()
        return left

    def _is_candidate(self, payload: IntermediateStepPayload) -> bool:
        return self._selection.candidates is not None and payload.name == self._selection.candidates

    def _call(self, start: IntermediateStep | None, end: IntermediateStep) -> RecordedStep:
        began = start.payload if start is not None else None
        messages, answer, found = prompt_of(began, end.payload), answer_of(end.payload), logprobs_of(end.payload)
        tokens = found.tokens(finish_reason=finish_reason(end.payload))
        chat = _chat(messages, answer, began, found.values)
        if tokens is not None and messages:
            self._calls.setdefault(_key(messages, answer), []).append(tokens)
        names = [end.payload.name, began.name if began else None]
        is_wanted = self._selection.candidates is None and is_targeted(
            names, self._functions.around(end.function_ancestry), self._selection
        )
        return _recorded(start, end, tokens=tokens, chat=chat, untrained=None if is_wanted else NOT_TARGETED)

    def _candidate(self, start: IntermediateStep | None, end: IntermediateStep) -> RecordedStep:
        """A scored candidate; its tokens are those of the call that said it, if there was one."""
        messages, answer = prompt_of(None, end.payload), answer_of(end.payload)
        if messages is None and start is not None:
            messages = prompt_of(start.payload, end.payload)
        if messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        found = logprobs_of(end.payload)
        known = self._calls.get(_key(messages, answer), []) if messages else []
        tokens = found.tokens() or (known.pop(0) if known else None)
        is_wanted = bool(self._functions.around(end.function_ancestry) & self._selection.target_functions)
        chat = _chat(messages, answer, None, found.values)
        return _recorded(start, end, tokens=tokens, chat=chat, untrained=None if is_wanted else NOT_TARGETED)


def recorded_steps(steps: Sequence[IntermediateStep], selection: Selection) -> list[RecordedStep]:
    """All steps of one workflow in the order in which they ended, then what never ended. Raises DecodeError."""
    spans = Spans(selection)
    spans.see(steps)
    return [step for step in map(spans.read, steps) if step is not None] + spans.rest()


def scores(steps: Sequence[RecordedStep], selection: Selection) -> Iterator[RecordedReward]:
    """The scores of candidates, as rewards of their steps."""
    for index, step in enumerate(steps):
        score = (step.data or {}).get("score")
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if step.event_type == "TTC_END" and step.name == selection.candidates is not None and is_number:
            yield RecordedReward(value=float(score), name=SCORE, step=index, is_score=True)  # pyright: ignore[reportArgumentType]


def _chat(
    messages: Sequence[Mapping[str, Any]] | None,
    answer: Mapping[str, Any],
    start: IntermediateStepPayload | None,
    logprobs: tuple[float, ...] | None,
) -> RecordedChat | None:
    if not messages:
        return None
    tools = (start.metadata or {}).get("tools_schema") if start is not None else None
    return RecordedChat(
        messages=tuple(json_value(message) for message in messages),
        answer=json_value(answer),
        tools=tuple(json_value(tools)) if isinstance(tools, list) else (),
        logprobs=logprobs,
    )


def _recorded(start: IntermediateStep | None, end: IntermediateStep, **fields: Any) -> RecordedStep:
    """NAT's fields of a span's last step, with those that only its first one has."""
    payload, began = end.payload, start.payload if start is not None else None
    node = end.function_ancestry
    tags = payload.tags if payload.tags is not None else began.tags if began else None
    return RecordedStep(
        event_type=payload.event_type.value,
        uuid=payload.UUID or None,
        parent_id=end.parent_id,
        function_ancestry=FunctionAncestry(**node.model_dump()),
        framework=payload.framework,
        name=payload.name,
        tags=tuple(tags) if tags is not None else None,
        metadata=_metadata(began, payload),
        data=_data(began, payload, has_tokens=fields.get("tokens") is not None),
        usage_info=payload.usage_info.model_dump() if payload.usage_info is not None else None,
        event_timestamp=payload.event_timestamp or None,
        span_event_timestamp=payload.span_event_timestamp or (began.event_timestamp if began else None) or None,
        **fields,
    )


def _data(
    start: IntermediateStepPayload | None, end: IntermediateStepPayload, *, has_tokens: bool
) -> dict[str, JsonValue] | None:
    data = _not_empty(end.data.model_dump()) if end.data is not None else {}
    if start is not None and start.data is not None:
        data = data | _not_empty(start.data.model_dump())
        data |= {
            key: value for key, value in _not_empty(end.data.model_dump() if end.data else {}).items() if key != "input"
        }
    data = without_logprobs(data) if has_tokens else data
    return json_value(data) or None


def _metadata(start: IntermediateStepPayload | None, end: IntermediateStepPayload) -> dict[str, JsonValue] | None:
    """Metadata of both steps, without values that are in `data` already."""
    field_values = [
        value for payload in (start, end) if payload and payload.data for value in vars(payload.data).values()
    ]
    found: dict[str, Any] = {}
    for payload in (start, end):
        own = _not_empty((payload.metadata if payload else None) or {})
        found |= {
            key: value
            for key, value in own.items()
            if value not in field_values and value not in [[v] for v in field_values]
        }
    return json_value(found) or None


def _not_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value != []}


def _key(messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> bytes:
    compared = {"messages": [[m.get("role"), m.get("content")] for m in messages], "answer": answer.get("content")}
    return orjson.dumps(json_value(compared), option=orjson.OPT_SORT_KEYS)


def json_value(value: Any) -> Any:
    """A JSON value as the log will hold it; what JSON cannot say is text."""
    try:
        return orjson.loads(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS))
    except orjson.JSONEncodeError:
        return orjson.loads(orjson.dumps(_with_texts(value, MAX_LEVELS)))


def _with_texts(value: Any, levels: int) -> Any:
    """A value with text in the place of what orjson refuses: long integers, half a surrogate pair, too many levels."""
    if isinstance(value, Mapping) and levels:
        named = cast("Mapping[Any, Any]", value)
        return {_unicode(str(key)): _with_texts(item, levels - 1) for key, item in named.items()}
    if isinstance(value, list | tuple) and levels:
        return [_with_texts(item, levels - 1) for item in cast("Sequence[Any]", value)]
    if value is None or isinstance(value, bool | float):
        return value
    is_short = isinstance(value, int) and -(2**63) <= value < 2**63
    return value if is_short else _unicode(str(value))


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_IDS = ("prompt_token_ids", "token_ids", "completion_token_ids")


def logprobs_of(end: IntermediateStepPayload) -> Logprobs:
    """All token data in the end of a call; of several sources for a value the first wins."""
    found = Logprobs()
    for source in _logprob_sources(end):
        read = read_logprobs(source)
        found = replace(
            found,
            values=found.values if found.values is not None else read.values,
            completion_ids=found.completion_ids or read.completion_ids,
            prompt_ids=found.prompt_ids or read.prompt_ids,
            spans=found.spans or read.spans,
            kept_ids=found.kept_ids or read.kept_ids,
        )
    return found


def without_logprobs(raw: Any) -> Any:
    """A copy of a framework's payload less what `logprobs_of` has read from it: the event holds it as tokens."""
    if isinstance(raw, Mapping):
        return {key: without_logprobs(value) for key, value in raw.items() if key != "logprobs" and key not in _IDS}
    return [without_logprobs(value) for value in raw] if isinstance(raw, list) else raw


def _logprob_sources(end: IntermediateStepPayload) -> Iterator[Any]:
    data = end.data
    payload: Any = data.payload if data is not None else None
    message = at(payload, "message")
    for source in (
        at(message, "response_metadata"),
        at(payload, "generation_info"),
        first(at(payload, "choices")),
        first(at(payload, "raw", "choices")),
        at(message, "additional_kwargs"),
        payload,
        at(payload, "raw"),
        end.metadata,
        data.model_extra if data is not None else None,
        end.model_extra,
    ):
        if isinstance(source, Mapping):
            yield source.get("logprobs")
            yield {key: source[key] for key in (*_IDS, "model_group", "version", "spans") if key in source}
