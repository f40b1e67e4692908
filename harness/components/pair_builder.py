"""`trajectory_builders.X._type: dpo_traj_builder`: preference pairs from the scored candidates of rollouts."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.eventlog.log import ReadableLog
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.components.trajectories import completions_of, read_assembled, read_steps
from rollstream.harness.recorded import pairs
from rollstream.harness.recorded.from_trajectories import trajectory_of
from rollstream.harness.recorded.pairs import PairSelection, ScoredCandidate
from rollstream.schemas.events import GroupClosed, StepRecorded, TrajectoryAssembled
from rollstream.schemas.finetuning import Trajectory

logger = logging.getLogger(__name__)


class DpoTrajectoryBuilder(RollstreamTrajectoryBuilder):
    """Rolls out every example and returns one trajectory per pair; each pair is submitted as its own group."""

    def __init__(self, trajectory_builder_config: Any) -> None:
        """The configuration has what `nat_aliases.DpoBuilderConfig` says."""
        super().__init__(trajectory_builder_config)
        config = trajectory_builder_config
        self._step_name: str = config.ttc_step_name
        self._reward_from_score_diff: bool = config.reward_from_score_diff
        self._selection = PairSelection(
            exhaustive_pairs=config.exhaustive_pairs,
            min_score_diff=config.min_score_diff,
            max_pairs_per_turn=config.max_pairs_per_turn,
            require_multiple_candidates=config.require_multiple_candidates,
        )
        self.dropped: Counter[str] = Counter()
        """Number of candidates without a pair so far, by reason."""

    async def trajectories_of(self, log: ReadableLog, groups: Sequence[GroupClosed]) -> list[list[Trajectory]]:
        """The pairs of each group. Raises ArtifactError, TruncatedError."""
        assembled = await read_assembled(log, groups)
        steps = await read_steps(log, groups)
        dropped: Counter[str] = Counter()
        found: list[list[Trajectory]] = []
        for group in groups:
            candidates = [
                candidate
                for member in group.members
                if member.trajectory_id in assembled
                for candidate in self._candidates(
                    group, assembled[member.trajectory_id], steps.get(member.rollout_id, {}), dropped
                )
            ]
            selected = pairs.select_pairs(candidates, self._selection)
            dropped += selected.dropped
            metadata = {"run_id": group.run_id, "job_id": group.job_id, "epoch": group.epoch}
            found.append(
                [
                    trajectory_of(pair, reward_from_score_diff=self._reward_from_score_diff, metadata=metadata)
                    for pair in selected.pairs
                ]
            )
        self.dropped += dropped
        logger.info("pairs=%d of groups=%d, dropped: %s", sum(map(len, found)), len(groups), dict(dropped))
        return found

    def _candidates(
        self,
        group: GroupClosed,
        assembled: TrajectoryAssembled,
        steps: Mapping[int, StepRecorded],
        dropped: Counter[str],
    ) -> list[ScoredCandidate]:
        """The candidates of one agent in one rollout."""
        found = pairs.candidates_of(
            (steps[index] for index in sorted(steps) if steps[index].agent == assembled.agent),
            name=self._step_name,
            example_id=group.example_id,
            rollout_id=assembled.rollout_id,
            tokens=completions_of(assembled.sequences),
        )
        dropped += found.dropped
        return found.candidates
