"""Events that the harness writes in epochwise runs: epochs, tasks and submissions. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from rollstream.eventlog import codec
from rollstream.harness.config.dataset import Example
from rollstream.schemas import ids
from rollstream.schemas.events import EpochStarted, RunStarted, SubmissionReceived, TaskRequested
from rollstream.schemas.events.recorded import group_size
from rollstream.schemas.events.training import SubmittedGroup
from rollstream.schemas.settings import JobSpec

NAMES_BYTES = 256 * 1024
"""Maximum bytes of the names that a submission leaves out, in one record of at most 1 MiB, beside the groups that it
submits.
"""


def epoch_started(spec: JobSpec, run_id: str, epoch: int, num_tasks: int, time_ms: int) -> EpochStarted:
    """An epoch whose tasks the harness asks for."""
    return EpochStarted(run_id=run_id, time_ms=time_ms, job_id=spec.job_id, epoch=epoch, num_tasks=num_tasks)


def epoch_tasks(
    started: RunStarted, spec: JobSpec, examples: Sequence[Example], epoch: int, *, min_version: int, time_ms: int
) -> list[TaskRequested]:
    """One task an example, in the order of the dataset: everything is rolled out, and filtered afterwards."""
    return [
        TaskRequested.of_run(
            started.seed,
            run_id=started.run_id,
            job_id=spec.job_id,
            example_id=example.example_id,
            inputs=example.inputs,
            group_id=ids.group_id(started.run_id, ids.name_of(spec.job_id), epoch, index),
            epoch=epoch,
            index=index,
            **group_size(spec.plan, example.inputs),
            minimum=spec.plan.min_generations,
            min_version=min_version,
            time_ms=time_ms,
            settings=spec.rollout,
        )
        for index, example in enumerate(examples)
    ]


def min_version(spec: JobSpec, base_version: int, num_planned: int) -> int:
    """The version that tasks must wait for, so that they are fresh enough at the next batch. It is sure to come."""
    return base_version + max(0, num_planned - spec.plan.max_staleness)


def submission(
    spec: JobSpec,
    run_id: str,
    epoch: int,
    groups: Sequence[SubmittedGroup],
    *,
    time_ms: int,
    percentile: float | None = None,
    is_last: bool = False,
    not_offered: Sequence[str] = (),
    num_empty: Mapping[str, int] = MappingProxyType({}),
) -> list[SubmissionReceived]:
    """The submission to train on. Its id derives from epoch and content, so submitting the same again changes nothing.

    The last record is the submission; those before it, written first, hold what of `not_offered` it has no room for.
    """
    content: Any = [group.model_dump(mode="json") for group in groups]
    digest = codec.canonical_digest([spec.job_id, epoch, content, is_last])
    whole = SubmissionReceived(
        run_id=run_id,
        time_ms=time_ms,
        job_id=spec.job_id,
        submission_id=ids.submission_id(spec.job_id, epoch, digest),
        epoch=epoch,
        groups=tuple(groups),
        curriculum_percentile=percentile,
        is_last=is_last,
        num_empty=dict(num_empty),
    )
    of_whole = {"groups": (), "curriculum_percentile": None, "is_last": False, "num_empty": {}}
    part = whole.model_copy(update={**of_whole, "is_part": True})
    *before, last = _portions(not_offered)
    return [
        *(part.model_copy(update={"not_offered": names, "num_before": nth}) for nth, names in enumerate(before)),
        whole.model_copy(update={"not_offered": last, "num_before": len(before)}),
    ]


def _portions(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The names in order, in portions of at most `NAMES_BYTES`; one without any for none."""
    portions: list[list[str]] = [[]]
    num_bytes = 0
    for name in names:
        size = len(orjson.dumps(name)) + 1
        if portions[-1] and num_bytes + size > NAMES_BYTES:
            portions.append([])
            num_bytes = 0
        portions[-1].append(name)
        num_bytes += size
    return [tuple(portion) for portion in portions]
