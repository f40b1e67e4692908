"""Task requests of an epoch that starts: its examples, its seeds, and how far they run ahead of training.

Also reads a run's examples from the artifact that its start names.
"""

import logging
import math
from collections.abc import Collection, Container, Mapping
from dataclasses import replace

import orjson
from pydantic import JsonValue

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import Retry, retrying
from rollstream.processors.curate import curriculum
from rollstream.processors.curate.state import Epoch, Job, Run
from rollstream.schemas import ids
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.events import EpochStarted, GroupClosed, RunStarted, TaskRequested
from rollstream.schemas.events.recorded import group_size
from rollstream.schemas.revisions import REFILLS_OTHERS_SINCE, REPLACES_STALE_SINCE

Dataset = Mapping[str, Mapping[str, JsonValue]]
"""Inputs by example id."""


def request_tasks(run: Run, job: Job, event: EpochStarted, dataset: Dataset) -> list[TaskRequested]:
    """The tasks of an epoch, by index. Notes in the job what was asked for; none if the dataset is empty.

    An event that says how many tasks there are has its way.
    """
    count = event.num_tasks or job.started.plan.tasks_per_epoch
    return _requests(run, job, event, dataset, 0, count)


def request_refill(run: Run, job: Job, epoch: Epoch, event: GroupClosed, dataset: Dataset) -> list[TaskRequested]:
    """Tasks in place of the groups of a closed epoch that are not trained on, behind those that it had.

    An example that the epoch has asked for comes up again only if the dataset, or the curriculum, has no other; by a
    recorded plan of revision 1 also before. This is the dynamic sampling of DAPO (arXiv 2503.14476, section 3.2), for
    no more tasks than are missing.
    """
    counts_stale = job.started.plan.revision < REPLACES_STALE_SINCE
    missing = job.groups_per_batch - sum(counts_stale or not job.is_stale(group) for group in epoch.gathered)
    if epoch.num_refills >= job.max_refills or missing <= 0:
        return []
    epoch.num_refills += 1
    return _requests(run, job, event, dataset, epoch.num_tasks, missing)


def _requests(
    run: Run, job: Job, event: EpochStarted | GroupClosed, dataset: Dataset, first: int, count: int
) -> list[TaskRequested]:
    plan = job.started.plan
    requests: list[TaskRequested] = []
    for index, example_id in enumerate(_examples(run, job, event.epoch, dataset, first, count), first):
        group_id = ids.group_id(event.run_id, job.short_name, event.epoch, index)
        job.last_asked[example_id] = event.epoch
        request = TaskRequested.of_run(
            run.started.seed,
            run_id=event.run_id,
            time_ms=event.time_ms,
            group_id=group_id,
            example_id=example_id,
            job_id=job.started.job_id,
            epoch=event.epoch,
            index=index,
            inputs=dict(dataset[example_id]),
            **group_size(plan, dataset[example_id]),
            minimum=plan.min_generations,
            min_version=min_version(job, index),
            settings=job.started.rollout,
            min_versions=_min_versions(run, job, index),
        )
        requests.append(request)
    return requests


def _min_versions(run: Run, job: Job, index: int) -> dict[str, int]:
    """Minimum versions of the other model groups in the task's engine, by model group; 0 for a frozen one."""
    others = set(job.started.rollout.agents.values()) - {job.started.model_group}
    trained = {other.started.model_group: min_version(other, index) for other in run.beside(job)}
    return {model_group: trained.get(model_group, 0) for model_group in sorted(others)}


def min_version(job: Job, index: int) -> int:
    """The version that a task's engine must have reached, so that its group is fresh at the manifest it should fill.

    Never above the version of the next manifest: a later one exists only if the groups before this one fill manifests,
    which filters may prevent, and then the task would wait without limit. Demonstrations need the base version only.
    Never below the last adoption: what an abandoned version samples is not trained on.
    """
    base = job.started.base_version
    if job.started.rollout.policy == "demonstration":
        return base
    ahead = 0 if job.is_single_batch else (len(job.ready) + index) // job.groups_per_batch
    return max(base, job.last_adoption, job.next_version + min(0, ahead - job.started.plan.max_staleness))


def _examples(run: Run, job: Job, epoch: int, dataset: Dataset, first: int, count: int) -> list[str]:
    plan = job.started.plan
    if first and plan.revision >= REFILLS_OTHERS_SINCE:
        return _other_examples(run, job, epoch, dataset, first, count)
    known = dataset.keys()
    if first:
        known = {name for name in dataset if job.last_asked.get(name) != epoch} or dataset.keys()
    seed = ids.derive_seed(run.started.seed, job.started.job_id, "curriculum")
    if not (plan.curriculum.enabled and plan.curriculum.steer):
        start = epoch * plan.tasks_per_epoch + first
        if first:
            return curriculum.epoch_permutation(known, start, count, seed)
        chosen, job.permutation = curriculum.continue_permutation(dataset, start, count, seed, job.permutation)
        return chosen
    if not first:
        job.progress = curriculum.expand(job.progress, epoch, plan.curriculum)
        for other in run.beside(job):
            other.progress = job.progress
    return _chosen(job, known, epoch, count, seed)


def _other_examples(run: Run, job: Job, epoch: int, dataset: Dataset, first: int, count: int) -> list[str]:
    """Examples of a refill: those that the epoch has not asked for, each once, then the others."""
    settings = job.started.plan.curriculum
    seed = ids.derive_seed(run.started.seed, job.started.job_id, "curriculum")
    turn = epoch * job.started.plan.tasks_per_epoch + first
    asked = {name for name in dataset if job.last_asked.get(name) == epoch}
    others, chosen = dataset.keys() - asked, list[str]()
    for names in (others, asked or dataset.keys()):
        missing = count - len(chosen)
        if not missing:
            break
        if settings.enabled and settings.steer:
            found = _chosen(job, names, epoch, missing, seed)
        else:
            found = curriculum.epoch_permutation(names, turn * len(names), missing, seed)
        chosen += dict.fromkeys(found) if names is others else found
    return chosen


def _chosen(job: Job, examples: Collection[str], epoch: int, count: int, seed: int) -> list[str]:
    known, settings = job.window.known(job.window_start), job.started.plan.curriculum
    return curriculum.choose(
        examples, known, job.last_asked, settings, job.progress, epoch=epoch, count=count, seed=seed
    )


logger = logging.getLogger(__name__)


def load_dataset(artifacts: ArtifactStore, started: RunStarted) -> Dataset:
    """Inputs by example id.

    Raises ArtifactError if the artifact is gone, was changed, or is not a dataset; StoreUnavailableError if the store
    does not answer.
    """
    data = artifacts.read(started.dataset)
    try:
        lines = [orjson.loads(line) for line in data.splitlines() if line.strip()]
        return {line["example_id"]: line["inputs"] for line in lines}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        uri = started.dataset.uri
        raise ArtifactError(
            f"dataset {uri} is not JSON lines of example_id and inputs: {error}; begin a run with one that is"
        ) from error


def unnamed_dataset(started: RunStarted) -> Dataset:
    """Stand-in for a dataset whose examples do not matter: as many tasks are requested, under the same ids."""
    return {"": {}} if started.num_examples else {}


class RunDatasets:
    """Datasets of the runs of one fold, loaded when an epoch first needs them."""

    def __init__(self, artifacts: ArtifactStore, retry: Retry) -> None:
        """`retry`: how long a store that is away is tried again outside of a refold."""
        self.by_run: dict[str, Dataset] = {}
        self.is_loading = False
        self._artifacts = artifacts
        self._retry = retry
        self._gone: dict[str, ArtifactError] = {}

    async def provide(self, started: RunStarted) -> None:
        """Have a run's dataset. Raises ArtifactError if it is gone, StoreUnavailableError once patience has ended."""
        if started.run_id in self._gone:
            raise self._gone[started.run_id]
        if started.run_id not in self.by_run:
            self.by_run[started.run_id] = await self._load(started, self._retry)

    async def provide_again(self, started: RunStarted, *, is_over: bool) -> None:
        """Have what a run's epochs were answered with; `is_over`: it ended later, so its examples do not matter.

        A store that is away is waited for without limit, for the answers were given with its dataset. A dataset that is
        gone by now cannot be asked for further tasks: the run's next epoch will fail.
        """
        if started.run_id in self.by_run:
            return
        self.by_run[started.run_id] = unnamed_dataset(started)
        if is_over:
            return
        try:
            self.by_run[started.run_id] = await self._load(started, replace(self._retry, patience_s=math.inf))
        except ArtifactError as error:
            logger.error(
                "run_id=%s: %s; its requested tasks continue, its next epoch or refill will end it",
                started.run_id,
                error,
            )
            self._gone[started.run_id] = error
        except BaseException:
            del self.by_run[started.run_id]
            raise

    def with_unnamed(self, run: Run | None) -> dict[str, Dataset]:
        """The datasets, that of `run` at least without its examples."""
        if run is None or run.started.run_id in self.by_run:
            return self.by_run
        return {run.started.run_id: unnamed_dataset(run.started)}

    def drop(self, run_id: str) -> None:
        """Forget a run that has ended."""
        self.by_run.pop(run_id, None)
        self._gone.pop(run_id, None)

    def keep_only(self, run_ids: Container[str]) -> None:
        """Forget all other runs."""
        for run_id in [run_id for run_id in self.by_run if run_id not in run_ids]:
            self.drop(run_id)

    async def _load(self, started: RunStarted, retry: Retry) -> Dataset:
        self.is_loading = True
        try:
            doing = f"load the dataset of run {started.run_id}"
            return await retrying(lambda: load_dataset(self._artifacts, started), doing, retry)
        finally:
            self.is_loading = False
