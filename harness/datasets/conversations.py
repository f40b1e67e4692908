"""Conversations of recorded trajectories, in OpenAI's chat format, with the model's tokens. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollstream.harness.components.trajectories import completions_of
from rollstream.producers.rollout.reply import AnswerParts, parts_of
from rollstream.producers.rollout.scored_answers import CANDIDATE, is_played
from rollstream.producers.traces.messages import answer_of, prompt_of
from rollstream.schemas.events import GroupClosed, StepRecorded, TrajectoryAssembled
from rollstream.schemas.events.intermediate_steps import IntermediateStepPayload
from rollstream.schemas.events.training import MemberRef

Message = dict[str, Any]
Starts = Mapping[str, StepRecorded]
"""Steps that begin the spans of LLM calls, by the spans' ids; some frameworks record the prompt only there."""


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """Messages of one or more training sequences of a trajectory, as the model was last sent them, and its answer."""

    messages: tuple[Message, ...]
    """Ends with an answer of the model."""
    answers: Mapping[int, int]
    """Step indices of the model's answers, by index of their messages; an earlier answer that the agent changed in the
    history is not among them."""
    tools: tuple[Message, ...] = ()
    """Tools offered with the last prompt, in OpenAI's format."""

    @property
    def first_answer(self) -> int:
        """Index of the first message that the model wrote in this trajectory."""
        return min(self.answers)


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """A member of a closed group with its content."""

    group: GroupClosed
    member: MemberRef
    assembled: TrajectoryAssembled
    steps: Mapping[int, StepRecorded]
    """Steps of its rollout by index."""

    def conversations(self) -> Iterator[ChatConversation | None]:
        """One conversation per training sequence; None for a sequence whose last call has no chat messages. Those that
        end with a compared answer which was not played are left out.

        A sequence whose messages another one goes on from, with other tokens, is part of that one's conversation.
        """
        starts = self._starts()
        candidates = [step for step in self.steps.values() if step.name == CANDIDATE and not is_played(step)]
        unplayed = {(step.metadata or {}).get("step_index") for step in candidates}
        found: list[ChatConversation | None] = []
        for sequence in self.assembled.sequences:
            indices = [part.step_index for part in sequence.completions]
            if indices[-1] in unplayed:
                continue
            calls = [self.steps[index] for index in indices if index in self.steps]
            found.append(_conversation(calls, starts) if len(calls) == len(indices) else None)
        yield from _joined(found)

    def scored_answers(self) -> Iterator[tuple[ChatConversation | None, float]]:
        """Conversations that end with an answer that was compared with others to the same prompt, and its score; None
        for an answer without chat messages."""
        starts = self._starts()
        for index, score in self.assembled.step_scores.items():
            call = self.steps.get(int(index))
            yield None if call is None else _conversation([call], starts), score

    def _starts(self) -> Starts:
        return {step.uuid: step for step in self.steps.values() if step.event_type == "LLM_START"}

    def tokens(self) -> dict[int, dict[str, Any]]:
        """`token_ids`, `prompt_token_ids`, `logprobs`, ... of every LLM call in it, by step index."""
        return completions_of(self.assembled.sequences)

    @property
    def facts(self) -> dict[str, Any]:
        """Reward and origin, for the row of a data set."""
        return {
            "reward": self.member.reward,
            "example_id": self.group.example_id,
            "job_id": self.group.job_id,
            "group_id": self.group.group_id,
            "rollout_id": self.member.rollout_id,
            "agent": self.member.agent,
            "epoch": self.group.epoch,
            "min_version": self.member.min_version,
            "max_version": self.member.max_version,
        }


def _conversation(calls: Sequence[StepRecorded], starts: Starts) -> ChatConversation | None:
    sent = [_messages_sent(call, starts.get(call.uuid)) for call in calls]
    last = sent[-1] if sent else None
    if last is None:
        return None
    answers = {
        len(before): call.step_index
        for call, before in zip(calls[:-1], sent[:-1], strict=True)
        if before is not None and _goes_on(before, last)
    }
    messages = (*last, _answer(calls[-1]))
    return ChatConversation(messages, answers | {len(last): calls[-1].step_index}, _tools(calls[-1]))


def _tools(call: StepRecorded) -> tuple[Message, ...]:
    """Tools of a call: recorded beside its messages, or in NAT's metadata."""
    found = (call.data or {}).get("tools") or (call.metadata or {}).get("tools_schema")
    return tuple(found) if isinstance(found, list) else ()


def _joined(found: Sequence[ChatConversation | None]) -> list[ChatConversation | None]:
    """Conversations without those that a longer one begins with; it takes over their answers."""
    joined: list[ChatConversation | None] = []
    for one in sorted(found, key=lambda one: -len(one.messages) if one is not None else 0):
        longer = None if one is None else next((n for n, other in enumerate(joined) if _begins_with(other, one)), None)
        if one is None or longer is None:
            joined.append(one)
        else:
            other = joined[longer]
            assert other is not None
            joined[longer] = replace(other, answers={**one.answers, **other.answers})
    return joined


def _begins_with(longer: ChatConversation | None, shorter: ChatConversation) -> bool:
    return longer is not None and longer.messages[: len(shorter.messages)] == shorter.messages


def _goes_on(before: Sequence[Message], later: Sequence[Message]) -> bool:
    """Whether a prompt goes on from an earlier one and its answer."""
    end = len(before)
    return [*later[:end]] == [*before] and len(later) > end and later[end].get("role") == "assistant"


def _messages_sent(call: StepRecorded, start: StepRecorded | None) -> tuple[Message, ...] | None:
    """The prompt of an LLM call as chat messages; None for one of text or ids, or if its framework recorded none."""
    if (call.metadata or {}).get("gateway", {}).get("is_text"):
        return None
    sent = (call.data or {}).get("input")
    if (
        call.framework is None
        and isinstance(sent, list)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in sent)
    ):
        return tuple(sent)
    return prompt_of(None if start is None else _payload(start), _payload(call))


def _answer(call: StepRecorded) -> Message:
    """The answer of an LLM call as a message, with its tool calls apart."""
    data = call.data or {}
    output = data.get("output")
    if call.framework is not None or data.get("payload") is not None or not isinstance(output, str):
        return answer_of(_payload(call))
    parts = parts_of(output, (), call.step_index, None) if data.get("tools") else AnswerParts(output)
    message = {"role": "assistant", "content": parts.content}
    return message | ({"tool_calls": [*parts.tool_calls]} if parts.tool_calls else {})


def _payload(call: StepRecorded) -> IntermediateStepPayload:
    fields = {name: getattr(call, name) for name in ("event_type", "framework", "name", "metadata", "data")}
    return IntermediateStepPayload.model_validate(fields)
