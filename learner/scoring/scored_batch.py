"""A manifest's trajectories as its algorithm sees them, with their scores, and which scores that needs. No model."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollstream.learner.algorithms.base import BatchView, Member
from rollstream.learner.algorithms.pairs import items_of, pairs_of, rows_of_pairs
from rollstream.learner.model.collate import member_of, rows_of
from rollstream.learner.scoring.index import ScoreAsked
from rollstream.learner.scoring.scores import NONE, Scores, by_sequence, scored_rows, spans_of
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import BatchPlanned, TrajectoryAssembled
from rollstream.schemas.events.weights import Scorer
from rollstream.schemas.revisions import (
    CHECKS_REWARDS_SINCE,
    NEWEST_REVISION,
    OWN_VERSIONS_SINCE,
    PAIRS_HAVE_MEMBERS_SINCE,
)
from rollstream.schemas.settings import MAX_REWARD_SUM


def batch_of(
    settings: AlgorithmSettings,
    planned: BatchPlanned,
    trajectories: Sequence[TrajectoryAssembled],
    scores: Scores = NONE,
    revision: int = NEWEST_REVISION,
) -> BatchView:
    """Rows or pairs, as the algorithm needs them. Rewards are the manifest's, those of steps the trajectories'.
    `revision`: of the job.

    Raises DecodeError.
    """
    found = list(zip(trajectories, planned.members, strict=True))
    members = [member_of(one, reward=its.reward, staleness=its.staleness) for one, its in found]
    if revision >= CHECKS_REWARDS_SINCE:
        _check_rewards(members)
    by_role = {
        role: {index: by_sequence(trajectories[index], values) for index, values in by_member.items()}
        for role, by_member in scores.by_role.items()
    }
    if settings.pair_settings is not None:
        numbers = range(len(found)) if revision >= PAIRS_HAVE_MEMBERS_SINCE else [0] * len(found)
        numbered = zip(numbers, trajectories, planned.members, strict=True)
        items = [item for index, one, member in numbered for item in items_of(one, member.reward, index)]
        pairs = pairs_of(items, settings.pair_settings)
        rows, sides = rows_of_pairs(pairs)
        if by_role:
            rows = scored_rows(rows, spans_of(rows, trajectories), by_role)
        return BatchView(rows, members, sides, [pair.score_diff for pair in pairs])
    needs_logprobs = settings.needs.behaviour
    rows = [
        row
        for index, trajectory in enumerate(trajectories)
        for row in rows_of(
            trajectory,
            needs_logprobs=needs_logprobs,
            member=index,
            scores={role: by_member[index] for role, by_member in by_role.items() if index in by_member},
            model_group=planned.model_group if revision >= OWN_VERSIONS_SINCE else None,
        )
    ]
    return BatchView(rows, members)


def _check_rewards(members: Sequence[Member]) -> None:
    """Raises DecodeError naming the first rollout with a reward whose squares, summed over a batch, would overflow.

    Assembly and submissions refuse such rewards; the log may have those of other programs.
    """
    for member in members:
        found = (member.reward, *member.rewards.values(), *member.step_rewards.values())
        if abs(largest := max(found, key=abs)) > MAX_REWARD_SUM:
            raise DecodeError(
                f"rollout {member.rollout_id}, agent {member.agent}: reward {largest:g} is beyond {MAX_REWARD_SUM:g}; "
                "scale the rewards down"
            )


def asked_of(
    settings: AlgorithmSettings,
    scorers: Sequence[Scorer],
    planned: BatchPlanned,
    trajectories: Sequence[TrajectoryAssembled],
    revision: int,
) -> list[ScoreAsked]:
    """The scores that training on a manifest of a job needs: of members that are trained, by each scorer.

    Raises DecodeError.
    """
    batch = batch_of(settings, planned, trajectories, revision=revision)
    members = (row.member for row in batch.rows)
    if batch.pairs is not None:
        members = (span.member for span in spans_of(batch.rows, trajectories))
    trained = sorted(set(members))
    return [ScoreAsked(member, scorer) for scorer in scorers for member in trained]


def encoded(
    planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled], scores: Scores, budget: Mapping[str, Any]
) -> bytes:
    """Encode the arguments of `train` for other processes."""
    events = [one.model_dump_json() for one in (planned, *trajectories)]
    return orjson.dumps({"events": events, "budget": budget, **scores.as_json()})


def decoded_batch(data: bytes) -> tuple[BatchPlanned, list[TrajectoryAssembled], Scores, dict[str, Any]]:
    """Decode the result of `encoded`."""
    found = orjson.loads(data)
    trajectories = [TrajectoryAssembled.model_validate_json(one) for one in found["events"][1:]]
    planned = BatchPlanned.model_validate_json(found["events"][0])
    return planned, trajectories, Scores.of_json(found), found["budget"]
