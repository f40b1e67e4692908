"""Rows of the topics tasks, steps and trajectories. Token arrays become counts, texts are cut."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import orjson

from rollstream.eventlog.log import Received
from rollstream.metrics.projection.attempts import MAX_BIGINT
from rollstream.metrics.projection.columns import Row, copied
from rollstream.schemas import tokens
from rollstream.schemas.events.rollouts import (
    GroupStarted,
    LLMCall,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    TaskRequested,
    TrajectoryAssembled,
    VersionSpan,
)

Rows = Iterator[tuple[str, Row]]

TEXT_CHARS = 1000
"""Maximum length kept of a step's input or output, in characters."""
OWN_METADATA = ("gateway", "rollstream")
"""Keys of a step's metadata that rollstream writes."""
LLM_COLUMNS = (
    "num_prompt_tokens",
    "num_new_prompt_tokens",
    "num_completion_tokens",
    "model_group",
    "min_version",
    "max_version",
    "finish_reason",
    "prefix_step",
)


def number64(value: int) -> int | None:
    """A number that a 64-bit column can hold, else none."""
    return value if -MAX_BIGINT - 1 <= value <= MAX_BIGINT else None


def json_text(value: Any) -> str:
    """A JSON column's text."""
    return orjson.dumps(value).decode()


def cut(value: Any) -> str | None:
    """A text, or a JSON value as text, cut to `TEXT_CHARS`."""
    if value is None:
        return None
    return (value if isinstance(value, str) else json_text(value))[:TEXT_CHARS]


def cut_texts(value: Any) -> str | None:
    """JSON with its texts cut until it has at most `TEXT_CHARS`; none if it is longer with short texts too."""
    for longest in (TEXT_CHARS, 400, 100, 20):
        text = json_text(_with_texts_cut(value, longest))
        if len(text) <= TEXT_CHARS:
            return text
    return None


def _with_texts_cut(value: Any, longest: int) -> Any:
    if isinstance(value, dict):
        return {name: _with_texts_cut(item, longest) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_texts_cut(item, longest) for item in value]
    return value[:longest] if isinstance(value, str) else value


def versions(spans: Iterable[VersionSpan]) -> tuple[int | None, int | None]:
    """Oldest and newest version that a token was sampled under; none if there is no token."""
    found = [span.version for span in spans if span.length]
    return (min(found), max(found)) if found else (None, None)


def task_requested(event: TaskRequested, _: Received) -> Rows:
    """A task."""
    row = copied("task_requested", event)
    row |= {
        "task_index": event.index,
        "seed": number64(event.seed),
        "environment": event.settings.environment,
        "policy": event.settings.policy,
        "inputs": cut_texts(event.inputs),
    }
    yield "task_requested", row


def group_started(event: GroupStarted, _: Received) -> Rows:
    """A group that opens."""
    yield "group_started", {**copied("group_started", event), "task_index": event.index}


def rollout_started(event: RolloutStarted, _: Received) -> Rows:
    """An attempt that begins."""
    yield "rollout_started", {**copied("rollout_started", event), "seed": number64(event.seed)}


def rollout_ended(event: RolloutEnded, _: Received) -> Rows:
    """An attempt's end; the first end or failure of an attempt decides it, so both share a table."""
    message = "; ".join(event.missing_scores.values())[:TEXT_CHARS] or None
    row = copied("rollout_finished", event)
    yield "rollout_finished", {**row, "state": "ended", "cause": None, "message": message, "is_final": True}


def rollout_failed(event: RolloutFailed, _: Received) -> Rows:
    """An attempt's failure."""
    row = {**copied("rollout_finished", event), "state": "failed", "message": event.message[:TEXT_CHARS]}
    yield "rollout_finished", {**row, **dict.fromkeys(("num_steps", "num_rewards", "stop_reason", "digest"))}


def step_recorded(event: StepRecorded, _: Received) -> Rows:
    """A step: names, texts, usage and token counts. Written out, for most events are steps and copying takes longer."""
    data = event.data or {}
    yield (
        "step_recorded",
        {
            "rollout_id": event.rollout_id,
            "step_index": event.step_index,
            "group_id": event.group_id,
            "agent": event.agent,
            "event_type": event.event_type,
            "name": event.name,
            "parent_id": event.parent_id,
            "framework": event.framework,
            "seconds": _seconds(event.span_event_timestamp, event.event_timestamp),
            "input": cut(data.get("input")),
            "output": cut(data.get("output")),
            "usage": None if event.usage_info is None else json_text(event.usage_info),
            "metadata": _own_metadata(event.metadata),
            **_llm_columns(event.llm),
        },
    )


def _seconds(began: float | None, ended: float | None) -> float | None:
    """None if the beginning was not measured: it is the end then, or is not there."""
    return None if began is None or ended is None or ended <= began else ended - began


def _own_metadata(metadata: Mapping[str, Any] | None) -> str | None:
    """The parts of a step's metadata that the gateway and a session add; that of other programs may be of any size."""
    found = {name: metadata[name] for name in OWN_METADATA if name in metadata} if metadata else None
    return json_text(found) if found else None


def _llm_columns(call: LLMCall | None) -> Row:
    if call is None:
        return dict.fromkeys(LLM_COLUMNS)
    oldest, newest = versions(call.spans)
    num_new = tokens.count(call.prompt_ids)
    return {
        "num_prompt_tokens": num_new + (call.prefix.length if call.prefix else 0),
        "num_new_prompt_tokens": num_new,
        "num_completion_tokens": tokens.count(call.completion_ids),
        "model_group": call.spans[0].model_group if call.spans else None,
        "min_version": oldest,
        "max_version": newest,
        "finish_reason": call.finish_reason,
        "prefix_step": call.prefix.step_index if call.prefix else None,
    }


def trajectory_assembled(event: TrajectoryAssembled, received: Received) -> Rows:
    """A trajectory without its tokens."""
    completions = [completion for sequence in event.sequences for completion in sequence.completions]
    oldest, newest = versions(span for completion in completions for span in completion.spans)
    row = copied("trajectory_assembled", event)
    row |= {
        "rewards": json_text(event.rewards),
        "num_sequences": len(event.sequences),
        "num_tokens": sum(tokens.count(sequence.token_ids) for sequence in event.sequences),
        "num_completion_tokens": sum(completion.length for completion in completions),
        "min_version": oldest,
        "max_version": newest,
        "digest": received.digest,
    }
    yield "trajectory_assembled", row


ROLLOUT_ROWS: dict[str, Callable[[Any, Received], Rows]] = {
    "task_requested": task_requested,
    "group_started": group_started,
    "rollout_started": rollout_started,
    "rollout_ended": rollout_ended,
    "rollout_failed": rollout_failed,
    "step_recorded": step_recorded,
    "trajectory_assembled": trajectory_assembled,
}
"""Row builder by event kind, given the event and its record; others are copied by column name alone."""
