"""Rollouts that exist already, played as they were: what a task's inputs hold, or name by artifact, is its steps."""

from pydantic import ValidationError

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import in_own_thread, retrying
from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.reply import MAX_TURNS, FinalError, TurnsExhausted
from rollstream.producers.rollout.rewards import FinalNoScoreError
from rollstream.producers.rollout.session import Session
from rollstream.schemas.errors import EnvironmentRunError, first_invalid
from rollstream.schemas.events.recorded import INPUT, RECORDED, RecordedMember, RecordedRollout

MAX_BYTES = 256 << 20
"""Maximum size of one recorded rollout that is an artifact."""


@register_environment(RECORDED)
class RecordedEnvironment(Environment):
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
        """Play it; a store that does not answer is tried again while the rollout has time.

        Raises EnvironmentRunError for a rollout that is missing, broken or known to have failed, NoScoreError for one
        that could not be scored. What is known to have failed, or to have no score, fails finally.
        """
        members, number, artifacts = session.inputs.pop(INPUT, None), session.member, session.artifacts
        rollout = await retrying(
            lambda: _rollout(members, number, artifacts),
            f"read the recorded rollout of member {number}",
            in_thread=in_own_thread,
        )
        if rollout.error is not None:
            raise FinalError(
                f"recorded rollout {rollout.source_id or session.member} failed when it was recorded: {rollout.error}; "
                "correct what failed, or leave out the example"
            )
        indices: list[int] = []
        for step in rollout.steps:
            recorded = await session.record(step, retokenise=self._retokenise, assumed_version=self._assumed_version)
            indices.append(recorded)
        for reward in rollout.rewards:
            step_index = None if reward.step is None else indices[reward.step]
            await session.reward(reward.value, reward.name, step_index, reward.agent, is_score=reward.is_score)
        if rollout.missing_score is not None:
            raise FinalNoScoreError(f"recorded rollout {rollout.source_id or session.member}: {rollout.missing_score}")
        if rollout.stop_reason == MAX_TURNS:
            raise TurnsExhausted("the agent had no turn left when the rollout was recorded")


def _rollout(members: object, number: int, artifacts: ArtifactStore | None) -> RecordedRollout:
    if not isinstance(members, list) or number >= len(members):
        num = len(members) if isinstance(members, list) else 0
        raise EnvironmentRunError(
            f"no recorded rollout for member {number}: the task has only {num}; record more or request fewer"
        )
    try:
        member = RecordedMember.model_validate(members[number])
        if member.rollout is not None:
            return member.rollout
        assert member.artifact is not None
        if artifacts is None:
            raise EnvironmentRunError(
                f"the recorded rollout of member {number} is an artifact, but no artifact store is configured; "
                "set artifact_uri"
            )
        return RecordedRollout.model_validate_json(artifacts.read(member.artifact, max_bytes=MAX_BYTES))
    except ValidationError as error:
        raise EnvironmentRunError(
            f"the recorded rollout of member {number} is invalid: {first_invalid(error)}; correct it and "
            "submit it again"
        ) from error
