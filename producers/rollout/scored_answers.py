"""Records of scored answers to the same messages: a TTC_END step each, in the form of NAT's candidates. Pure."""

import operator
from collections.abc import Mapping
from typing import Any

from rollstream.schemas import ids
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events import StepRecorded

CANDIDATE = "dpo_candidate_move"
"""Name of a candidate's step, as NAT's DPO builder looks for it."""
SCORE = "score"
"""Name of the reward that says how good a candidate is beside the others."""


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
