"""Model and optimizer of one job between two manifests. Blocking; always used from the one thread that trains."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from rollstream.learner import advantages
from rollstream.learner.checkpoint import Checkpoint, CheckpointPosition
from rollstream.learner.collate import Row, StepAdvantages, rows_of
from rollstream.learner.losses import ALGORITHMS
from rollstream.learner.model import PolicyModel, from_bytes, make_deterministic
from rollstream.learner.optimizer import load_state_tensors, make_optimizer, state_tensors
from rollstream.learner.step import StepResult, train_batch
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, TrajectoryAssembled


class Trainer:
    """What one job changes from batch to batch."""

    def __init__(self, job: JobSubmitted, *, threads: int | None) -> None:
        """Load the job's model. Raises ModelError, or ConfigError for a kind of job that is not known here.

        `threads`: used if the job does not say its own number.
        """
        self._settings = job.settings
        if self._settings.kind == "dpo":
            raise ConfigError(f"job {job.job_id}: this learner trains rl and sft jobs, not dpo")
        make_deterministic(self._settings.threads or threads)
        seed = ids.derive_seed(self._settings.seed, job.run_id, job.model_group, "adapters")
        self.model = PolicyModel(self._settings.model, seed=seed)
        self._optimizer = make_optimizer(self.model.trainable(), self._settings.optimizer)

    def begin(self, weights: bytes, what: str) -> None:
        """Begin the job from published weights, with a new optimizer. Raises ModelError naming `what`."""
        self.model.load_weights(from_bytes(weights, what))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this job."""
        self.model.load_weights(checkpoint.part("weights"))
        load_state_tensors(self._optimizer, self.model.trainable(), checkpoint.part("optimizer"))
        random = checkpoint.part("random")
        torch.set_rng_state(random["cpu"])
        if self.model.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])

    def checkpoint(self, position: CheckpointPosition) -> Checkpoint:
        """Everything to go on from, as it is now."""
        tensors = {f"weights/{name}": value for name, value in self.model.weights().items()}
        state = state_tensors(self._optimizer, self.model.trainable())
        tensors |= {f"optimizer/{name}": value for name, value in state.items()}
        tensors["random/cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state()
        return Checkpoint(position, tensors)

    def train(self, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled]) -> StepResult:
        """Train on a manifest's trajectories, given in its order. Raises DecodeError, RunFailedError."""
        rows = self._rows(planned, trajectories)
        result = train_batch(self.model, self._optimizer, rows, self._settings, index=planned.index, seed=planned.seed)
        return replace(result, metrics={**result.metrics, **manifest_metrics(planned)})

    def _rows(self, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled]) -> list[Row]:
        algorithm = ALGORITHMS[self._settings.algorithm.name]
        return [
            row
            for trajectory, advantage in zip(trajectories, self._advantages(planned, trajectories), strict=True)
            for row in rows_of(trajectory, advantage, needs_logprobs=algorithm.needs_logprobs)
        ]

    def _advantages(
        self, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled]
    ) -> Sequence[float | StepAdvantages]:
        """One a member, or one a step of it. Rewards are the manifest's; those of steps are the trajectories'."""
        settings = self._settings.algorithm
        groups = [(t.group_id, t.agent) for t in trajectories]
        rewards = [member.reward for member in planned.members]
        if settings.step_rewards == "total":
            return advantages.by_group(rewards, groups, settings.advantage)
        members = [advantages.stepped(t, reward) for t, reward in zip(trajectories, rewards, strict=True)]
        return advantages.by_step(members, groups, settings.advantage)


def manifest_metrics(planned: BatchPlanned) -> dict[str, float]:
    """Rewards (mean, population standard deviation) and staleness of a manifest's members."""
    rewards = [member.reward for member in planned.members]
    staleness = [member.staleness for member in planned.members]
    if not rewards:
        return {}
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(variance),
        "staleness/min": float(min(staleness)),
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": float(max(staleness)),
        "batch/trajectories": float(len(rewards)),
        "batch/groups": float(len({member.group_id for member in planned.members})),
    }
