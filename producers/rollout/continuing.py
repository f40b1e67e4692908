"""An attempt that goes on in another process: what the log has of it, and the state of its session by that. Pure.

Only rollouts that agents outside play are continued: their agents are still there. Any other is run again.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.engines.base import Generation
from rollstream.producers.rollout.conversation import Conversation, Prompt
from rollstream.producers.rollout.gateway_interface import END, CallOptions
from rollstream.producers.rollout.reply import Reply
from rollstream.schemas import tokens
from rollstream.schemas.events import RewardRecorded, StepRecorded


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """The records of an attempt whose producer is gone, the first of each index, by index."""

    steps: dict[int, tuple[StepRecorded, str]]
    """Recorded steps with their digests, by index."""
    rewards: dict[int, tuple[RewardRecorded, str]]


def answers(
    steps: Sequence[StepRecorded],
    conversation: Callable[[str], Conversation],
    rendered: Callable[[StepRecorded], tuple[str, str]],
) -> dict[int, Reply]:
    """The answers that were given, by step; each agent's conversation has them afterwards.

    `rendered`: the text of a step's prompt, and its `history`.
    """
    found: dict[int, Reply] = {}
    seen: dict[int, array[int]] = {}
    for step in sorted(steps, key=_prefix_first):
        call = step.llm
        if call is None:
            continue
        new_ids, completion = tokens.decode_ids(call.prompt_ids), tokens.decode_ids(call.completion_ids)
        kept = array("i") if call.prefix is None else seen[call.prefix.step_index][: call.prefix.length]
        text, history = rendered(step)
        prompt = Prompt(text, kept + new_ids, call.prefix, history=history)
        seen[step.step_index] = prompt.token_ids + completion
        stop = CallOptions.of(step).stop
        text_of_answer = conversation(step.agent).append_sampled(step.step_index, prompt, completion, stop)
        logprobs = () if call.logprobs is None else tuple(tokens.decode_floats(call.logprobs))
        reason = "length" if call.finish_reason == "length" else "stop"
        generation = Generation(tuple(completion), logprobs, call.spans, reason)
        began_ms = round((step.span_event_timestamp or 0.0) * 1000)
        found[step.step_index] = Reply(text_of_answer, step.step_index, reason, prompt.token_ids, generation, began_ms)
    return found


def turns(steps: Sequence[StepRecorded]) -> dict[str, tuple[int, int]]:
    """Recorded turns by agent, and its answers with all that may have been lost: their number decides a seed, which
    none of the recorded ones may have had. A call is not a turn if some of its answers were lost: it is repeated.
    """
    calls: dict[str, Counter[tuple[Any, ...]]] = {}
    for step in steps:
        metadata: Any = (step.metadata or {}).get("gateway")
        if isinstance(metadata, dict):
            body, key = metadata.get("body_sha256"), metadata.get("key_sha256")
            call = (max(1, int(metadata.get("n", 1))), body, key, step.span_event_timestamp)
            calls.setdefault(step.agent, Counter())[call] += 1
    num_lost = max((step.step_index + 1 for step in steps), default=0) - len(steps)
    return {
        agent: (sum(num // call[0] for call, num in found.items()), found.total() + num_lost)
        for agent, found in calls.items()
    }


def rewards_after_end(
    steps: Sequence[StepRecorded], rewards: Sequence[RewardRecorded]
) -> dict[int, tuple[str, str | None]]:
    """Names and agents of the rewards of the whole, by index, that followed the end of the agent outside: reward
    functions gave them. Those that the agent gave are older, whatever their names; event time never goes back.
    """
    ended_ms = min((step.time_ms for step in steps if step.name == END), default=math.inf)
    later = [one for one in rewards if one.time_ms >= ended_ms and one.step_index is None]
    return {one.reward_index: (one.name, one.agent) for one in later}


def _prefix_first(step: StepRecorded) -> tuple[int, int]:
    """A call comes after the one that it goes on from, though steps are numbered as calls begin."""
    prefix = None if step.llm is None else step.llm.prefix
    return (step.step_index if prefix is None else max(step.step_index, prefix.step_index + 1), step.step_index)
