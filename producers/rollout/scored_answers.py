"""The answers that are scored: each agent's last one, and those to the same messages, beside each other. Pure.

Of the latter each is a TTC_END step, in the form of NAT's candidates.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from rollstream.producers.rollout.conversation import first_stop
from rollstream.producers.rollout.reply import Message
from rollstream.schemas import ids
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.events.recorded import RecordedChat

CANDIDATE = "dpo_candidate_move"
"""Name of a candidate's step, as NAT's DPO builder looks for it."""
SCORE = "score"
"""Name of the reward that says how good a candidate is beside the others."""
LABEL = "is_label"
"""Key, in the metadata of a call's step, of an answer that should have been given, which nobody scores."""


class LastAnswers:
    """Messages of each agent's last call and the answer as its client got it, in a run, after a takeover, in a what-if.

    The last call is the one with the highest step index that is not a label; of scored candidates, the one that was
    played.
    """

    def __init__(self, steps: Iterable[StepRecorded] = ()) -> None:
        self.messages: dict[str, tuple[Message, ...]] = {}
        """Messages by agent; none for an agent whose last call's messages are not known."""
        self._at: dict[str, int] = {}
        for step in steps:
            self.add(step)

    def add(self, step: StepRecorded) -> None:
        """Take a step; one that is not an answer, or is before the agent's last answer, changes nothing."""
        if is_call(step) or is_played(step):
            self._put(step, _messages_of(step))

    def add_recorded(self, step: StepRecorded, chat: RecordedChat | None) -> None:
        """Take a step that happened elsewhere, of a call with the messages that came with it."""
        if not is_call(step):
            self.add(step)
        else:
            self._put(step, None if chat is None else (*chat.messages, chat.answer))

    def _put(self, step: StepRecorded, messages: tuple[Message, ...] | None) -> None:
        if step.step_index < self._at.get(step.agent, -1):
            return
        self._at[step.agent] = step.step_index
        self.messages.pop(step.agent, None)
        if messages is not None:
            self.messages[step.agent] = messages


def is_call(step: StepRecorded) -> bool:
    """Whether a step is an answer that was given, not a label."""
    return step.event_type == "LLM_END" and (step.metadata or {}).get(LABEL) is not True


def _messages_of(step: StepRecorded) -> tuple[Message, ...] | None:
    data: Any = step.data
    if not isinstance(data, dict):
        return None
    asked, sent = (step.metadata or {}).get("gateway"), data.get("input") or []
    sent = sent if isinstance(sent, list) else [{"role": "user", "content": sent}]
    output, stop = data.get("output"), asked.get("stop") if isinstance(asked, dict) else ()
    if isinstance(output, str) and isinstance(stop, list):  # what other tools recorded may be anything
        output = output[: first_stop(output, [text for text in stop if isinstance(text, str)])]
    return (*sent, {"role": "assistant", "content": output})


def turn_id(rollout_id: str, agent: str, turn_index: int) -> str:
    """Name of a turn that no other rollout has: `turn_<index>_<8 hex>`."""
    return f"turn_{turn_index}_{ids.derive_seed(rollout_id, agent, turn_index) & 0xFFFFFFFF:08x}"


def index_of(selected: Any, num_answers: int) -> int:
    """The index of the selected answer, which may be an integer of numpy or a tensor. Raises EnvironmentRunError."""
    try:
        index = operator.index(selected)
    except Exception as error:
        raise EnvironmentRunError(f"selected is a {type(selected).__name__}; give the index of an answer") from error
    if not 0 <= index < num_answers:
        raise EnvironmentRunError(f"selected is {index}; give the index of one of the {num_answers} answers, from 0")
    return index


def candidate_fields(
    answered: StepRecorded, *, turn: str, turn_index: int, index: int, score: float, is_selected: bool
) -> dict[str, Any]:
    """Fields of a candidate's step. `answered`: the call that gave it; its index is in the metadata."""
    data: Mapping[str, Any] = answered.data or {}
    return {
        "event_type": "TTC_END",
        "name": CANDIDATE,
        "data": {
            "input": data.get("input"),
            "output": data.get("output"),
            "turn_id": turn,
            "turn_index": turn_index,
            "candidate_index": index,
            "score": score,
        },
        "metadata": {"step_index": answered.step_index, "is_selected": is_selected},
    }


def is_played(step: StepRecorded) -> bool:
    """Whether a step is that of the candidate which the rollout went on with."""
    metadata = step.metadata or {}
    return step.name == CANDIDATE and "step_index" in metadata and metadata.get("is_selected") is True
