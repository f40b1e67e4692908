"""Rollouts that exist already, played as they were: what a task's inputs hold, or name by artifact, is its steps."""

import asyncio

from pydantic import ValidationError

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.producers.environment import Environment
from rollstream.producers.registry import register_environment
from rollstream.producers.session import Session
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.recorded import INPUT, RecordedMember, RecordedRollout


@register_environment("recorded")
class Recorded(Environment):
    """Member m of a group plays the m-th recorded rollout of its task: steps in order, then the rewards with it.

    `retokenise`: make tokens from text where none were recorded. `assumed_version`: weight version of tokens that were
    recorded without one; none: the version that the task was asked for at.
    """

    def __init__(self, retokenise: bool = False, assumed_version: int | None = None) -> None:
        if assumed_version is not None and assumed_version < 0:
            raise ValueError(f"assumed_version is {assumed_version}; it must be 0 or more")
        self._retokenise = retokenise
        self._assumed_version = assumed_version

    async def run(self, session: Session) -> None:
        """Play it. Raises EnvironmentRunError for a rollout that is missing, broken or known to have failed."""
        rollout = await asyncio.to_thread(_rollout, session.inputs.pop(INPUT, None), session.member)
        if rollout.error is not None:
            raise EnvironmentRunError(f"recorded rollout {rollout.source_id or session.member}: {rollout.error}")
        indices: list[int] = []
        for step in rollout.steps:
            recorded = await session.record(step, retokenise=self._retokenise, assumed_version=self._assumed_version)
            indices.append(recorded)
        for reward in rollout.rewards:
            step_index = None if reward.step is None else indices[reward.step]
            await session.reward(reward.value, reward.name, step_index, reward.agent, is_score=reward.is_score)


def _rollout(members: object, number: int) -> RecordedRollout:
    if not isinstance(members, list) or number >= len(members):
        num = len(members) if isinstance(members, list) else 0
        raise EnvironmentRunError(f"there is no recorded rollout for member {number}: the task has {num} of them")
    try:
        member = RecordedMember.model_validate(members[number])
        if member.rollout is not None:
            return member.rollout
        assert member.artifact is not None
        data = ArtifactStore(member.artifact.uri.rpartition("/")[0]).read(member.artifact)
        return RecordedRollout.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EnvironmentRunError(
            f"the recorded rollout of member {number} is broken: {where}: {first['msg']}"
        ) from error
