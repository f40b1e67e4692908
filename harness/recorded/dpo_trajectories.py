"""Preference pairs as NAT's trajectories, and the exact tokens that one still refers to. Pure."""

from collections.abc import Mapping
from typing import Any

from rollstream.eventlog import codec
from rollstream.harness.recorded.scored_candidates import Candidate, CandidatePair
from rollstream.producers.recorded_logprobs import read_logprobs
from rollstream.schemas.finetuning import DPOItem, OpenAIMessage, Trajectory
from rollstream.schemas.recorded import RecordedTokens

REFERENCES = "references"
CHOSEN, REJECTED = "chosen", "rejected"


def trajectory_of(pair: CandidatePair, *, reward_from_score_diff: bool, metadata: Mapping[str, Any]) -> Trajectory:
    """A pair as a trajectory of one DPOItem; `metadata`: what it is known by beside (run_id, epoch, ...)."""
    chosen, rejected = pair.chosen, pair.rejected
    item = DPOItem(prompt=_prompt(chosen), chosen_response=chosen.response, rejected_response=rejected.response)
    return Trajectory(
        episode=[item],
        reward=pair.score_diff if reward_from_score_diff else chosen.score,
        metadata={
            **metadata,
            "dpo_type": "preference_pair",
            "id": chosen.example_id,
            "example_id": chosen.example_id,
            "turn_id": chosen.turn_id,
            "turn_index": chosen.turn_index,
            "score_diff": pair.score_diff,
            "chosen_score": chosen.score,
            "rejected_score": rejected.score,
            "chosen_index": chosen.index,
            "rejected_index": rejected.index,
            REFERENCES: {
                CHOSEN: {**chosen.reference, "content_sha256": _content_sha256(item, chosen.response)},
                REJECTED: {**rejected.reference, "content_sha256": _content_sha256(item, rejected.response)},
            },
        },
    )


def score_diff_of(trajectory: Trajectory) -> float:
    """The difference of the scores of a trajectory's pairs: as told, else its reward, else 1."""
    told = (trajectory.metadata or {}).get("score_diff")
    known = (value for value in (told, trajectory.reward) if isinstance(value, int | float))
    return next((float(value) for value in known if 0 < value < float("inf")), 1.0)


def tokens_of(trajectory: Trajectory, item: DPOItem, side: str) -> RecordedTokens | None:
    """Exact tokens of the `chosen` or `rejected` answer, if they are referred to and its content is as it was."""
    reference: Mapping[str, Any] = ((trajectory.metadata or {}).get(REFERENCES) or {}).get(side) or {}
    response = item.chosen_response if side == CHOSEN else item.rejected_response
    if reference.get("content_sha256") != _content_sha256(item, response):
        return None
    return read_logprobs(reference.get("tokens")).tokens()


def _prompt(candidate: Candidate) -> list[OpenAIMessage] | str:
    if isinstance(candidate.prompt, str):
        return candidate.prompt
    return [OpenAIMessage(role=role, content=text) for role, text in candidate.prompt]


def _content_sha256(item: DPOItem, response: str) -> str:
    return codec.canonical_digest([item.model_dump(mode="json")["prompt"], response])
