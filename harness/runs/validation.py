"""Validation: examples that are rolled out under the newest weights and never trained on, at every so many epochs.

`Validation` and its results are pure; `validation_of` reads the dataset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from rollstream.eventlog import codec
from rollstream.harness.config import dataset
from rollstream.harness.config.dataset import Example
from rollstream.harness.config.file import validation_config
from rollstream.harness.config.jobs import rollout_settings
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import NOTHING_VALIDATED, Progress
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.events import RunStarted, TaskRequested
from rollstream.schemas.settings import JobSpec, RolloutSettings


@dataclass(frozen=True)
class Validation:
    """The validation of a run's job: examples and rollout settings."""

    started: RunStarted
    spec: JobSpec
    examples: Sequence[Example]
    settings: RolloutSettings
    interval: int = 1
    """Epochs from one validation to the next."""
    num_rollouts: int = 1
    asked: str = field(init=False)
    """Part of the ids: asking for the same again repeats them."""

    def __post_init__(self) -> None:
        content = [[list(example) for example in self.examples], self.settings.model_dump(mode="json")]
        object.__setattr__(self, "asked", codec.canonical_digest(content)[:8])

    def group_ids(self, epoch: int) -> list[str]:
        """Groups of the validation before `epoch`, by example."""
        run_id = self.started.run_id
        job = ids.name_of(self.spec.job_id)
        indices = range(len(self.examples))
        return [ids.validation_group_id(run_id, job, epoch, self.asked, index) for index in indices]

    def tasks(
        self, epoch: int, *, min_version: int, time_ms: int, min_versions: Mapping[str, int] = MappingProxyType({})
    ) -> list[TaskRequested]:
        """One task an example, played by engines that hold at least `min_version`, of other model groups `min_versions`
        by group."""
        return [
            TaskRequested.of_run(
                self.started.seed,
                run_id=self.started.run_id,
                time_ms=time_ms,
                group_id=group_id,
                example_id=example.example_id,
                job_id=self.spec.job_id,
                epoch=epoch,
                index=index,
                purpose="validation",
                inputs=example.inputs,
                num_rollouts=self.num_rollouts,
                minimum=1,
                min_version=min_version,
                settings=self.settings,
                min_versions=dict(min_versions),
            )
            for index, (example, group_id) in enumerate(zip(self.examples, self.group_ids(epoch), strict=True))
        ]

    def due_epoch(self, progress: Progress) -> int | None:
        """The newest epoch of a streamed job that is validated before it; after the last one, the number of epochs.

        None before the job has started, and between its last seal and its end.
        """
        job = progress.job(self.spec.job_id)
        if job.started is None or job.outcome not in (None, "succeeded"):
            return None
        next_epoch = 0 if job.sealed is None else job.sealed.epoch + 1
        if job.outcome == "succeeded":
            return next_epoch
        if job.sealed is not None and job.sealed.is_last:
            return None
        return next_epoch - next_epoch % self.interval

    def due_tasks(self, epoch: int, progress: Progress) -> list[TaskRequested]:
        """Tasks of a streamed job's validation whose groups are not closed, at the version that is planned by now."""
        job = progress.job(self.spec.job_id)
        assert job.started is not None
        others = sorted(set(self.settings.agents.values()) - {self.spec.model_group})
        time_ms = (job.sealed or job.started).time_ms
        closed = job.validated.get(epoch, NOTHING_VALIDATED)
        tasks = self.tasks(
            epoch,
            min_version=_planned(progress, self.spec.model_group),
            time_ms=time_ms,
            min_versions={group: _planned(progress, group) for group in others},
        )
        return [task for task in tasks if task.group_id not in closed]

    def holds(self, epoch: int, progress: Progress) -> bool:
        """Whether an epoch of the job waits for its validation, so that the evaluation gate judges before its tasks."""
        if self.spec.plan.gate is None or epoch % self.interval:
            return False
        return not self._is_closed(epoch, progress)

    def is_done(self, progress: Progress) -> bool:
        """Whether the validation after the job's end is over, if the job succeeded."""
        job = progress.job(self.spec.job_id)
        epoch = self.due_epoch(progress)
        if progress.ended is not None or job.outcome != "succeeded" or epoch is None:
            return True
        return self._is_closed(epoch, progress)

    def _is_closed(self, epoch: int, progress: Progress) -> bool:
        closed = progress.job(self.spec.job_id).validated.get(epoch, NOTHING_VALIDATED)
        return len(closed) >= len(self.examples) and all(group_id in closed for group_id in self.group_ids(epoch))


def _planned(progress: Progress, model_group: str) -> int:
    """The newest version that sealed epochs yield; 0 of a model group that no job of the run trains."""
    found = [
        job.started.base_version + (0 if job.sealed is None else job.sealed.next_batch_index)
        for job in progress.jobs.values()
        if job.started is not None and job.started.model_group == model_group
    ]
    return max(found, default=0)


def validation_of(config: RunConfig, run: RunPlan) -> Validation | None:
    """The validation of a run, None if it has none. Raises ConfigError."""
    if config.validation is None:
        return None
    examples, settings = evaluated(config, run)
    return Validation(run.started, run.jobs[-1], examples, settings, config.validation.interval)


def evaluated(config: RunConfig, run: RunPlan) -> tuple[list[Example], RolloutSettings]:
    """Examples and settings of a run's validation: a configuration of its own, if it has one, else the run's."""
    found = validation_config(config)
    assert found is not None
    assert found.dataset is not None
    assert config.validation is not None
    is_own = config.validation.config is not None
    settings = rollout_settings(found, run.started.run_id) if is_own else run.jobs[-1].rollout
    return dataset.read_dataset(found.dataset), settings
