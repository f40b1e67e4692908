"""Rows of the topics tasks, steps and trajectories. Token arrays become counts, texts are cut."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson

from rollstream.schemas import tokens
from rollstream.schemas.events_rollouts import (
    GroupStarted,
    LLMCall,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    TaskCancelled,
    TaskRequested,
    TrajectoryAssembled,
    VersionSpan,
)

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]

TEXT_CHARS = 1000
"""What is kept of a step's input or output, in characters."""
LLM_COLUMNS = (
    "num_prompt_tokens",
    "num_new_prompt_tokens",
    "num_completion_tokens",
    "model_group",
    "min_version",
    "max_version",
    "finish_reason",
)


def number64(value: int) -> int | None:
    """A number that a 64-bit column can hold, else none."""
    return value if -(2**63) <= value < 2**63 else None


def json_text(value: Any) -> str:
    """A JSON column's text."""
    return orjson.dumps(value).decode()


def cut(value: Any) -> str | None:
    """A text, or a JSON value as text, cut to `TEXT_CHARS`."""
    if value is None:
        return None
    return (value if isinstance(value, str) else json_text(value))[:TEXT_CHARS]


def versions(spans: Iterable[VersionSpan]) -> tuple[int | None, int | None]:
    """Oldest and newest version that a token was sampled under; none if there is no token."""
    found = [span.version for span in spans if span.length]
    return (min(found), max(found)) if found else (None, None)


def task_requested(event: TaskRequested, _: str) -> Rows:
    """A task."""
    yield (
        "task_requested",
        {
            "group_id": event.group_id,
            "job_id": event.job_id,
            "example_id": event.example_id,
            "epoch": event.epoch,
            "task_index": event.index,
            "purpose": event.purpose,
            "num_rollouts": event.num_rollouts,
            "minimum": event.minimum,
            "seed": number64(event.seed),
            "min_version": event.min_version,
            "environment": event.settings.environment,
            "policy": event.settings.policy,
            "inputs": cut(event.inputs),
        },
    )


def task_cancelled(event: TaskCancelled, _: str) -> Rows:
    """A task's cancellation."""
    yield "task_cancelled", {"group_id": event.group_id, "cause": event.cause}


def group_started(event: GroupStarted, _: str) -> Rows:
    """A group that opens."""
    yield (
        "group_started",
        {
            "group_id": event.group_id,
            "job_id": event.job_id,
            "example_id": event.example_id,
            "epoch": event.epoch,
            "task_index": event.index,
            "purpose": event.purpose,
            "policy": event.policy,
            "size": event.size,
            "minimum": event.minimum,
            "timeout_ms": event.timeout_ms,
            "void_cause": event.void_cause,
            "owner": event.owner,
        },
    )


def rollout_started(event: RolloutStarted, _: str) -> Rows:
    """An attempt that begins."""
    yield (
        "rollout_started",
        {
            "rollout_id": event.rollout_id,
            "group_id": event.group_id,
            "member": event.member,
            "attempt": event.attempt,
            "seed": number64(event.seed),
        },
    )


def rollout_ended(event: RolloutEnded, _: str) -> Rows:
    """An attempt's end; the first end or failure of an attempt decides it, so both share a table."""
    yield (
        "rollout_finished",
        {
            "rollout_id": event.rollout_id,
            "group_id": event.group_id,
            "state": "ended",
            "num_steps": event.num_steps,
            "num_rewards": event.num_rewards,
            "stop_reason": event.stop_reason,
            "cause": None,
            "message": "; ".join(event.missing_scores.values())[:TEXT_CHARS] or None,
            "is_final": True,
            "digest": event.digest,
        },
    )


def rollout_failed(event: RolloutFailed, _: str) -> Rows:
    """An attempt's failure."""
    yield (
        "rollout_finished",
        {
            "rollout_id": event.rollout_id,
            "group_id": event.group_id,
            "state": "failed",
            "num_steps": None,
            "num_rewards": None,
            "stop_reason": None,
            "cause": event.cause,
            "message": event.message[:TEXT_CHARS],
            "is_final": event.is_final,
            "digest": None,
        },
    )


def step_recorded(event: StepRecorded, _: str) -> Rows:
    """A step: names, texts, usage and token counts."""
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
            "input": cut(data.get("input")),
            "output": cut(data.get("output")),
            "usage": None if event.usage_info is None else json_text(event.usage_info),
            **_llm_columns(event.llm),
        },
    )


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
    }


def reward_recorded(event: RewardRecorded, _: str) -> Rows:
    """A reward."""
    yield (
        "reward_recorded",
        {
            "rollout_id": event.rollout_id,
            "reward_index": event.reward_index,
            "group_id": event.group_id,
            "name": event.name,
            "value": event.value,
            "step_index": event.step_index,
            "agent": event.agent,
        },
    )


def trajectory_assembled(event: TrajectoryAssembled, digest: str) -> Rows:
    """A trajectory without its tokens."""
    completions = [completion for sequence in event.sequences for completion in sequence.completions]
    oldest, newest = versions(span for completion in completions for span in completion.spans)
    yield (
        "trajectory_assembled",
        {
            "trajectory_id": event.trajectory_id,
            "group_id": event.group_id,
            "rollout_id": event.rollout_id,
            "agent": event.agent,
            "model_group": event.model_group,
            "member": event.member,
            "attempt": event.attempt,
            "example_id": event.example_id,
            "job_id": event.job_id,
            "epoch": event.epoch,
            "purpose": event.purpose,
            "policy": event.policy,
            "reward": event.reward,
            "rewards": json_text(event.rewards),
            "num_steps": event.num_steps,
            "num_sequences": len(event.sequences),
            "num_tokens": sum(tokens.count(sequence.token_ids) for sequence in event.sequences),
            "num_completion_tokens": sum(completion.length for completion in completions),
            "min_version": oldest,
            "max_version": newest,
            "digest": digest,
        },
    )


ROLLOUT_ROWS: dict[str, Callable[[Any, str], Rows]] = {
    "task_requested": task_requested,
    "task_cancelled": task_cancelled,
    "group_started": group_started,
    "rollout_started": rollout_started,
    "rollout_ended": rollout_ended,
    "rollout_failed": rollout_failed,
    "step_recorded": step_recorded,
    "reward_recorded": reward_recorded,
    "trajectory_assembled": trajectory_assembled,
}
"""Row builder by event kind, given the event and its content digest."""
