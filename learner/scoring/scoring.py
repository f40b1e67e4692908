"""Scores what no event has, writes it to the log, and reads what is trained with from there."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog
from rollstream.learner.scoring.contexts import Contexts
from rollstream.learner.scoring.index import ScoreAsked, ScoreIndex
from rollstream.learner.scoring.models import ScoringModels
from rollstream.learner.scoring.scores import NONE, Logprobs, Scores, events_of, missing, recorded_scores
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, ReferenceScored, TrajectoryAssembled, WeightsPublished
from rollstream.schemas.events.weights import Scorer
from rollstream.schemas.settings import ArtifactRef

T = TypeVar("T")


class InThread(Protocol):
    """Runs blocking work where torch runs."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """Return what `work` returns."""
        ...


class GroupOwner(Protocol):
    """The learner that owns the model group."""

    term: int

    async def check_owner(self) -> None:
        """Read on to the end of `weights`. Raises FencedError if the model group is another learner's by now."""
        ...

    async def read(self, artifact: ArtifactRef) -> bytes:
        """A version's weights."""
        ...


class KnownGroup(Protocol):
    """State of the model group according to the log."""

    published: dict[int, WeightsPublished]
    scores: ScoreIndex


class AskingTrainer(Protocol):
    """The job's trainer, as far as it is asked here."""

    scoring: ScoringModels

    def asked(
        self, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled], base_sha256: str
    ) -> list[ScoreAsked]:
        """The scores that training on a manifest needs."""
        ...


class ScoreWriter:
    """Gives a job's loss its scores."""

    def __init__(
        self,
        job: JobSubmitted,
        log: EventLog,
        in_thread: InThread,
        owner: GroupOwner,
        known: Callable[[], KnownGroup],
    ) -> None:
        """`known`: what the log says of the job's model group by now."""
        self._job = job
        self._log = log
        self._in_thread = in_thread
        self._owner = owner
        self._known = known
        self._contexts = Contexts(log, job, owner.read)

    async def scores(
        self,
        trainer: AskingTrainer,
        planned: BatchPlanned,
        trajectories: Sequence[TrajectoryAssembled],
        seconds: dict[str, float],
    ) -> Scores:
        """Provide the scores that a manifest's loss needs, in this order:

        1. what no event has is computed, a group of rollouts at a time, whole: equal bits whatever was there before
        2. ReferenceScored of it are sent, if nobody else has claimed the model group
        3. the values are read from the log, the first ones of each trajectory

        A crash before 2 computes them again. `seconds` is given the phase `score`. Raises FencedError, and
        RunFailedError if one is not finite.
        """
        if trainer.scoring.is_idle:
            return NONE
        began = time.monotonic()
        if self._job.base_version not in self._known().published:
            await self._owner.check_owner()  # this learner has published it, and not read it yet
        base = self._known().published[self._job.base_version]
        asked = await self._in_thread(lambda: trainer.asked(planned, trajectories, base.weights_sha256))
        if missing(self._known().scores, planned, asked):
            await self._owner.check_owner()
            wanted = missing(self._known().scores, planned, asked)
            await self._write(trainer.scoring, planned, trajectories, asked, wanted)
            await self._owner.check_owner()
        found = await recorded_scores(self._log, self._known().scores, planned, asked)
        seconds["score"] = time.monotonic() - began
        return found

    async def _write(
        self,
        models: ScoringModels,
        planned: BatchPlanned,
        trajectories: Sequence[TrajectoryAssembled],
        asked: Sequence[ScoreAsked],
        wanted: Sequence[ScoreAsked],
    ) -> None:
        groups: dict[tuple[Scorer, str], list[int]] = {}
        for one in asked:
            groups.setdefault((one.scorer, trajectories[one.member].group_id), []).append(one.member)
        for (scorer, _), members in groups.items():
            lacking = [one for one in wanted if one.scorer == scorer and one.member in members]
            if not lacking:
                continue
            found = await self._computed(models, scorer, [trajectories[member] for member in members])
            self._check_finite(scorer, [trajectories[member] for member in members], found)
            await self._owner.check_owner()
            await self._log.send_all(self._events(planned, lacking, dict(zip(members, found, strict=True))))
            failpoint("learner/between-scores-of-groups")

    def _check_finite(
        self, scorer: Scorer, trajectories: Sequence[TrajectoryAssembled], found: Sequence[Logprobs]
    ) -> None:
        """Raises RunFailedError naming a trajectory with a score that is not finite: once recorded, it would stay."""
        for trajectory, logprobs in zip(trajectories, found, strict=True):
            odd = logprobs[~np.isfinite(logprobs)]
            if len(odd):
                source = scorer.model or f"version {self._job.base_version} of {self._job.model_group}"
                raise RunFailedError(
                    f"trajectory {trajectory.trajectory_id}: the {scorer.role} ({source}) gave a token the "
                    f"log-probability {odd[0]}; look for such numbers in its weights, or compute in float32 "
                    "(model.dtype), and begin a new run"
                )

    def _events(
        self, planned: BatchPlanned, lacking: Sequence[ScoreAsked], found: Mapping[int, Logprobs]
    ) -> list[ReferenceScored]:
        run_id, term = self._job.run_id, self._owner.term
        return [
            event for one in lacking for event in events_of(planned, one, found[one.member], run_id=run_id, term=term)
        ]

    async def _computed(
        self, models: ScoringModels, scorer: Scorer, trajectories: Sequence[TrajectoryAssembled]
    ) -> list[Logprobs]:
        if models.lacks_base(scorer):
            artifact = self._known().published[self._job.base_version].artifact
            weights = await self._owner.read(artifact)
            await self._in_thread(lambda: models.take_base(weights, f"artifact {artifact.uri}"))
        contexts = await self._contexts.of(scorer.context, trajectories) if scorer.context else []
        return await self._in_thread(lambda: models.score(scorer, trajectories, contexts))
