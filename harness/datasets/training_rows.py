"""Rows of training data sets: TRL's conversational formats and OpenAI's chat format. Pure."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from rollstream.harness.datasets.conversations import ChatConversation, Message, RecordedTrajectory

Row = dict[str, Any]
Group = Sequence[RecordedTrajectory]
"""The complete members of one closed group."""
NO_MESSAGES = "without chat messages"
OF_ROLLOUT = ("rollout_id", "min_version", "max_version")
"""Facts that differ between the two answers of a pair."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Trajectories and pairs to write."""

    min_reward: float | None = None
    """Smallest reward of what is to be learned."""
    is_best_only: bool = False
    """Whether only the best rollout of each group is learned."""

    def demonstrations(self, group: Group) -> list[RecordedTrajectory]:
        """Members of a group to imitate; of equally good ones the first."""
        chosen = [one for one in group if self.min_reward is None or one.member.reward >= self.min_reward]
        if not self.is_best_only:
            return chosen
        best = {agent: max(self._of(agent, chosen), key=lambda one: one.member.reward) for agent in _agents(chosen)}
        return list(best.values())

    def is_desirable(self, one: RecordedTrajectory, group: Group) -> bool | None:
        """Label of a trajectory: by the smallest reward, or else by its agent's mean in the group; None at the mean."""
        reward = one.member.reward
        if self.min_reward is not None:
            return reward >= self.min_reward
        mean = statistics.fmean(other.member.reward for other in self._of(one.member.agent, group))
        return None if math.isclose(reward, mean, rel_tol=1e-9, abs_tol=1e-12) else reward > mean

    @staticmethod
    def _of(agent: str, group: Iterable[RecordedTrajectory]) -> list[RecordedTrajectory]:
        return [one for one in group if one.member.agent == agent]


@dataclass(slots=True)
class Tally:
    """Numbers of rows written and of what was left out."""

    num_rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Numbers by what they are."""


Format = Callable[[Group, RowOptions, Tally], Iterator[Row]]


def trl_sft(group: Group, choice: RowOptions, tally: Tally) -> Iterator[Row]:
    """`messages` for SFTTrainer."""
    for one, conversation in chosen_conversations(group, choice, tally):
        yield {"messages": _for_templates(conversation.messages), **_tools(conversation), **one.facts}


def openai_chat(group: Group, choice: RowOptions, tally: Tally) -> Iterator[Row]:
    """`messages` for OpenAI's supervised fine-tuning, which takes no other keys."""
    for _, conversation in chosen_conversations(group, choice, tally):
        yield {
            "messages": _for_openai(conversation),
            **({"tools": [*conversation.tools]} if conversation.tools else {}),
        }


def trl_kto(group: Group, choice: RowOptions, tally: Tally) -> Iterator[Row]:
    """`prompt`, `completion` and `label` for KTOTrainer."""
    for one in group:
        label = choice.is_desirable(one, group)
        if label is None:
            tally.left_out["trajectories with the mean reward of their group"] += 1
            continue
        for conversation in _conversations(one, tally):
            prompt, completion = _halves(conversation)
            yield {"prompt": prompt, "completion": completion, "label": label, **_tools(conversation), **one.facts}


def trl_dpo(group: Group, choice: RowOptions, tally: Tally) -> Iterator[Row]:
    """`prompt`, `chosen` and `rejected` for DPOTrainer: the best and the worst answer to each prompt of a group, by the
    scores of answers that were compared with each other, or else by the rewards of their rollouts."""
    by_prompt: dict[str, list[_Answered]] = {}
    for one in group:
        for answered in _scored(one, tally) if one.assembled.step_scores else _first_answered(one, tally):
            by_prompt.setdefault(answered.key, []).append(answered)
    for found in by_prompt.values():
        chosen, rejected = max(found, key=_value), min(found, key=_value)
        if chosen.value == rejected.value:
            tally.left_out["prompts whose answers are equally good"] += 1
        elif _halves(chosen.conversation) == _halves(rejected.conversation):
            tally.left_out["prompts whose best and worst answers are the same"] += 1
        elif choice.min_reward is not None and chosen.value < choice.min_reward:
            tally.left_out["prompts without an answer of the smallest reward"] += 1
        else:
            yield _pair(chosen, rejected)


class _Answered(NamedTuple):
    """A prompt with one of its answers, and how good that is."""

    by: RecordedTrajectory
    conversation: ChatConversation
    value: float
    is_scored: bool = False
    """Whether the value is a score, which is not compared with a reward."""

    @property
    def key(self) -> str:
        """Text that answers to the same prompt have in common."""
        prompt, _ = _halves(self.conversation)
        return json.dumps([self.is_scored, self.by.member.agent, self.conversation.tools, prompt], sort_keys=True)


def _value(answered: _Answered) -> float:
    return answered.value


def _scored(one: RecordedTrajectory, tally: Tally) -> Iterator[_Answered]:
    for conversation, score in one.scored_answers():
        if conversation is None:
            tally.left_out[f"scored answers {NO_MESSAGES}"] += 1
        else:
            yield _Answered(one, conversation, score, is_scored=True)


def _first_answered(one: RecordedTrajectory, tally: Tally) -> Iterable[_Answered]:
    """The first of the trajectory's conversations with each prompt."""
    found = [_Answered(one, conversation, one.member.reward) for conversation in _conversations(one, tally)]
    return {answered.key: answered for answered in reversed(found)}.values()


def _pair(chosen: _Answered, rejected: _Answered) -> Row:
    prompt, answer = _halves(chosen.conversation)
    facts = chosen.by.facts
    both = (("chosen", chosen), ("rejected", rejected))
    return {
        "prompt": prompt,
        "chosen": answer,
        "rejected": _halves(rejected.conversation)[1],
        **_tools(chosen.conversation),
        **{f"score_{which}": answered.value for which, answered in both},
        **{name: facts[name] for name in ("example_id", "job_id", "group_id", "agent", "epoch")},
        **{f"{name}_{which}": answered.by.facts[name] for which, answered in both for name in OF_ROLLOUT},
    }


def chosen_conversations(
    group: Group, choice: RowOptions, tally: Tally
) -> Iterator[tuple[RecordedTrajectory, ChatConversation]]:
    """Conversations of the members of a group to imitate."""
    chosen = choice.demonstrations(group)
    tally.left_out["trajectories not chosen by their reward"] += len(group) - len(chosen)
    for one in chosen:
        for conversation in _conversations(one, tally):
            yield one, conversation


def _conversations(one: RecordedTrajectory, tally: Tally) -> Iterator[ChatConversation]:
    for conversation in one.conversations():
        if conversation is None:
            tally.left_out[f"sequences {NO_MESSAGES}"] += 1
        else:
            yield conversation


def _halves(conversation: ChatConversation) -> tuple[list[Message], list[Message]]:
    """The messages before the model's first answer, and the others."""
    messages = _for_templates(conversation.messages)
    return messages[: conversation.first_answer], messages[conversation.first_answer :]


def _tools(conversation: ChatConversation) -> Row:
    """The column of tools, which every row of a file has."""
    return {"tools": [*conversation.tools]}


def _for_templates(messages: Iterable[Message]) -> list[Message]:
    """Messages with the arguments of calls as objects, which chat templates expect."""
    return [_with_arguments(one, parsed) for one in messages]


def _for_openai(conversation: ChatConversation) -> list[Message]:
    """Messages with the arguments of calls as JSON texts; null is the content of a message of calls alone, and 0 the
    weight of an answer that the model was shown."""
    found: list[Message] = []
    for index, message in enumerate(conversation.messages):
        message = _with_arguments(message, lambda value: value if isinstance(value, str) else json.dumps(value))
        if message.get("tool_calls") and not message.get("content"):
            message = message | {"content": None}
        is_shown = message["role"] == "assistant" and index not in conversation.answers
        found.append(message | {"weight": 0} if is_shown else message)
    return found


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    return message | {"tool_calls": [_changed(call, change) for call in calls]}


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": change(function["arguments"])}}


def parsed(arguments: Any) -> Any:
    """The arguments of a tool call, which OpenAI's format writes as a JSON text; the text itself if it is not JSON, or
    if it cannot be written again, such as a number of more than 64 bits."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
        orjson.dumps([[[[[[found]]]]]])  # as deep as in a row
    except (ValueError, TypeError, RecursionError):
        return arguments
    return found


def _agents(group: Iterable[RecordedTrajectory]) -> list[str]:
    return [*dict.fromkeys(one.member.agent for one in group)]
