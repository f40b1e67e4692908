"""Validation: examples that are rolled out under the newest weights and never trained on, at every so many epochs.

`Validation` and what it answers are pure; `validation_of` reads the dataset.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.eventlog import codec
from rollstream.harness import dataset
from rollstream.harness.config.config_file import validation_config
from rollstream.harness.config.settings import JobSpec, rollout_settings
from rollstream.harness.dataset import Example
from rollstream.harness.plan import RunPlan
from rollstream.harness.progress import Progress
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.events import RunStarted, TaskRequested
from rollstream.schemas.settings import RolloutSettings


@dataclass(frozen=True)
class Validation:
    """What is rolled out for a validation of a run's job."""

    started: RunStarted
    spec: JobSpec
    examples: Sequence[Example]
    settings: RolloutSettings
    interval: int = 1
    """Epochs from one validation to the next."""
    num_rollouts: int = 1
    asked: str = field(init=False)
    """Stands in the ids: asking for the same again repeats them."""

    def __post_init__(self) -> None:
        content = [[list(example) for example in self.examples], self.settings.model_dump(mode="json")]
        object.__setattr__(self, "asked", codec.canonical_digest(content)[:8])

    def group_ids(self, epoch: int) -> list[str]:
        """Groups of the validation before `epoch`, by example."""
        run_id = self.started.run_id
        job = self.spec.job_id.removeprefix(f"{run_id}/")
        places = range(len(self.examples))
        return [ids.validation_group_id(run_id, job, epoch, self.asked, index) for index in places]

    def tasks(self, epoch: int, *, min_version: int, time_ms: int) -> list[TaskRequested]:
        """One task an example, played by engines that hold at least `min_version`."""
        return [
            TaskRequested(
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
                seed=ids.derive_seed(self.started.seed, group_id),
                min_version=min_version,
                settings=self.settings,
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
        planned = job.started.base_version + (job.sealed.next_batch_index if job.sealed is not None else 0)
        time_ms = (job.sealed or job.started).time_ms
        closed = job.validated.get(epoch, frozenset[str]())
        tasks = self.tasks(epoch, min_version=planned, time_ms=time_ms)
        return [task for task in tasks if task.group_id not in closed]

    def is_done(self, progress: Progress) -> bool:
        """Whether the validation after the job's end is over, if the job succeeded."""
        job = progress.job(self.spec.job_id)
        epoch = self.due_epoch(progress)
        if progress.ended is not None or job.outcome != "succeeded" or epoch is None:
            return True
        return job.validated.get(epoch, frozenset[str]()).issuperset(self.group_ids(epoch))


def validation_of(config: RunConfig, run: RunPlan) -> Validation | None:
    """What a run validates by, None if it does not. Raises ConfigError."""
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
