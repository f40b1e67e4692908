"""A custom trainer adapter: the built-in one, with clipped rewards and a log of submissions."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from pydantic import FiniteFloat, model_validator

from rollstream.harness import register_trainer_adapter
from rollstream.harness.components.adapter import RollstreamTrainerAdapter
from rollstream.harness.config.components import RollstreamTrainerAdapterConfig
from rollstream.schemas.finetuning import FinetuneConfig, TrainingJobRef, Trajectory, TrajectoryCollection

SUBMISSIONS = "submissions.jsonl"


class BoundedAdapterConfig(RollstreamTrainerAdapterConfig, name="bounded_adapter"):
    """All fields of the built-in adapter, and two more."""

    lowest_reward: FiniteFloat = -1.0
    highest_reward: FiniteFloat = 1.0

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if self.lowest_reward >= self.highest_reward:
            raise ValueError(
                f"lowest_reward {self.lowest_reward:g} is not below highest_reward {self.highest_reward:g}; lower it"
            )
        return self


class BoundedAdapter(RollstreamTrainerAdapter):
    """One reward far out of line bends the advantages of its whole group: here none is beyond the bounds."""

    def __init__(self, adapter_config: BoundedAdapterConfig) -> None:
        super().__init__(adapter_config)
        self._config = adapter_config
        self._file: Path | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Ours, and the folder of the file: a constructor would be too early, because it may never be used."""
        await super().initialize(run_config)
        run_config.output_dir.mkdir(parents=True, exist_ok=True)
        self._file = run_config.output_dir / SUBMISSIONS

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit bounded copies and note them. Raises what ours raises.

        1. The log has the submission, under an id that derives from it. 2. The file notes it under the same id, once.
        """
        bounded = [[self._bounded(one) for one in group] for group in trajectories.trajectories]
        ref = await super().submit(TrajectoryCollection(trajectories=bounded, run_id=trajectories.run_id))
        self._record(ref, bounded)
        return ref

    def _bounded(self, trajectory: Trajectory) -> Trajectory:
        reward = min(max(trajectory.reward, self._config.lowest_reward), self._config.highest_reward)
        return trajectory.model_copy(update={"reward": reward})

    def _record(self, ref: TrainingJobRef, groups: list[list[Trajectory]]) -> None:
        assert self._file is not None
        submission = (ref.metadata or {}).get("submission_id")
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        if any(json.loads(line)["submission_id"] == submission for line in lines):
            return
        members = [(one.metadata or {}, one.reward) for group in groups for one in group]
        rewards = {str(metadata.get("trajectory_id")): reward for metadata, reward in members}
        record = {"epoch": (ref.metadata or {}).get("epoch"), "submission_id": submission, "rewards": rewards}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@register_trainer_adapter(config_type=BoundedAdapterConfig)
async def build_bounded_adapter(config: BoundedAdapterConfig, builder: Any) -> AsyncIterator[BoundedAdapter]:
    """The registered function."""
    yield BoundedAdapter(config)
