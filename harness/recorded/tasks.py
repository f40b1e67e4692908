"""Conversion of recorded rollouts to the tasks that play them. `tasks_of` is pure; `stored` first stores large ones as
artifacts.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from pydantic import JsonValue

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import put
from rollstream.schemas import ids
from rollstream.schemas.events import TaskRequested
from rollstream.schemas.events.recorded import INPUT, RECORDED, RecordedGroup, RecordedMember
from rollstream.schemas.settings import RolloutSettings

MAX_INLINE_BYTES = 256 * 1024
"""Maximum size of a group's rollouts as JSON in a task; larger ones are in the artifact store, one file each."""


async def stored(group: RecordedGroup, artifacts: ArtifactStore, *, max_bytes: int = MAX_INLINE_BYTES) -> RecordedGroup:
    """The group as it fits into a task: its rollouts by reference if together they are larger than `max_bytes`.

    Waits for room on a full disk. Raises StoreUnavailableError once patience with the store has ended.
    """
    texts = [member.rollout.model_dump_json().encode() if member.rollout else b"" for member in group.members]
    if sum(map(len, texts)) <= max_bytes:
        return group
    doing = f"store the recorded rollouts of {group.example_id}"
    members = [
        RecordedMember(artifact=await put(artifacts, text, ".rollout.json", doing)) if text else member
        for member, text in zip(group.members, texts, strict=True)
    ]
    return group.model_copy(update={"members": tuple(members)})


async def all_stored(groups: Iterable[RecordedGroup], artifacts: ArtifactStore) -> list[RecordedGroup]:
    """Apply `stored` to several groups in order."""
    return [await stored(group, artifacts) for group in groups]


def inputs_of(group: RecordedGroup) -> dict[str, JsonValue]:
    """Inputs of the group's task: the example's own, and the members. The form that a dataset row has too."""
    members: list[Any] = [orjson.loads(member.model_dump_json(exclude_defaults=True)) for member in group.members]
    return {**group.inputs, INPUT: members}


def played_by(settings: RolloutSettings, config: dict[str, JsonValue] | None = None) -> RolloutSettings:
    """The same settings for tasks that play recorded rollouts; `config` is that of the environment `recorded`."""
    return settings.model_copy(update={"environment": RECORDED, "environment_config": config or {}, "league": None})


def tasks_of(
    groups: Sequence[RecordedGroup],
    *,
    run_id: str,
    job_id: str,
    epoch: int,
    settings: RolloutSettings,
    name: str | None = None,
    first_index: int = 0,
    min_version: int = 0,
    seed: int = 0,
    time_ms: int = 0,
) -> list[TaskRequested]:
    """One task a group, in order, each member of which plays one recorded rollout.

    `settings` are those of the job's own rollouts or from `played_by`. `name` is part of the group ids (by default the
    job's own), so that they differ from those of other tasks of the epoch; `first_index` is that of the first task.
    The same groups give the same ids and events.
    """
    settings = settings if settings.environment == RECORDED else played_by(settings)
    short_name = name or ids.name_of(job_id)
    tasks: list[TaskRequested] = []
    for index, group in enumerate(groups, first_index):
        group_id = ids.group_id(run_id, short_name, epoch, index)
        tasks.append(
            TaskRequested.of_run(
                seed,
                run_id=run_id,
                time_ms=time_ms,
                group_id=group_id,
                example_id=group.example_id,
                job_id=job_id,
                epoch=epoch,
                index=index,
                purpose="train",
                inputs=inputs_of(group),
                num_rollouts=len(group.members),
                minimum=1,
                min_version=min_version,
                settings=settings,
            )
        )
    return tasks
