"""Model and optimizer of one job between two manifests. Blocking; always used from the one thread that trains."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from rollstream.learner import advantages
from rollstream.learner.checkpoint import Checkpoint, CheckpointPosition
from rollstream.learner.collate import Row, StepAdvantages, check_token_ids, rows_of
from rollstream.learner.losses import ALGORITHMS
from rollstream.learner.model import PolicyModel, from_bytes, make_deterministic
from rollstream.learner.optimizer import load_state_tensors, make_optimizer, state_tensors
from rollstream.learner.pairs import items_of, pairs_of
from rollstream.learner.preference_step import train_pairs
from rollstream.learner.reference import Reference
from rollstream.learner.step import StepResult, train_batch
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, TrajectoryAssembled

logger = logging.getLogger(__name__)


class Trainer:
    """What one job changes from batch to batch."""

    def __init__(self, job: JobSubmitted, *, threads: int | None) -> None:
        """Load the job's model. Raises ModelError, or ConfigError if kind and algorithm do not fit each other.

        `threads`: used if the job does not say its own number.
        """
        self._settings = job.settings
        kind, algorithm = self._settings.kind, self._settings.algorithm.name
        if (kind == "dpo") != (algorithm == "dpo"):
            raise ConfigError(f"job {job.job_id}: a {kind} job does not train by {algorithm}; dpo goes with dpo")
        make_deterministic(self._settings.threads or threads)
        seed = ids.derive_seed(self._settings.seed, job.run_id, job.model_group, "adapters")
        self.model = PolicyModel(self._settings.model, seed=seed)
        self._optimizer = make_optimizer(self.model.trainable(), self._settings.optimizer)
        self._reference: Reference | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the job's base version, which `refer_to` must then be given."""
        algorithm = self._settings.algorithm
        return algorithm.name == "dpo" or (algorithm.name == "grpo" and algorithm.kl_coefficient > 0)

    def refer_to(self, weights: bytes, what: str) -> None:
        """Compare with these published weights. Raises ModelError naming `what`."""
        self._reference = Reference(self.model, weights, what)

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
        for trajectory in trajectories:
            check_token_ids(trajectory, self.model.num_token_ids)
        if self._settings.algorithm.name == "dpo":
            result = self._train_pairs(planned, trajectories)
        else:
            rows, index, seed = self._rows(planned, trajectories), planned.index, planned.seed
            result = train_batch(
                self.model,
                self._optimizer,
                rows,
                self._settings,
                index=index,
                seed=seed,
                reference=self._reference,
            )
        return replace(result, metrics={**result.metrics, **manifest_metrics(planned)})

    def _train_pairs(self, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled]) -> StepResult:
        assert self._reference is not None
        members = zip(trajectories, planned.members, strict=True)
        items = [item for trajectory, member in members for item in items_of(trajectory, member.reward)]
        pairs = pairs_of(items, self._settings.algorithm)
        if not pairs:
            logger.warning(
                "batch=%s has no preference pair: version=%s changes nothing", planned.batch_id, planned.yields_version
            )
        index, seed = planned.index, planned.seed
        return train_pairs(self.model, self._reference, self._optimizer, pairs, self._settings, index=index, seed=seed)

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
        is_wide = settings.advantage in advantages.BATCH_WIDE
        groups = [("" if is_wide else t.group_id, t.agent) for t in trajectories]
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
