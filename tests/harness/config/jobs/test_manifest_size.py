"""Batches whose manifest no record could hold."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import check_record_size
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import check_attempts
from rollstream.harness.config.dataset import Example
from rollstream.harness.config.jobs import MAX_GROUP, WRITTEN, check_manifests, jobs_of, most_trajectories
from rollstream.harness.runs.plan import RunPlan, new_run
from rollstream.schemas import ids
from rollstream.schemas.base import Locator
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned
from rollstream.schemas.events.manifest_size import most_members
from rollstream.schemas.events.training import (
    AttemptOutcome,
    BatchMember,
    GroupClosed,
    MatchResult,
    MemberRef,
    StepsRange,
)
from rollstream.schemas.settings import JobSpec

pytestmark = pytest.mark.usefixtures("registered_alone")
RUN = "guess_number-0a1b2c"


def job_of(written: dict[str, Any], **changes: Any) -> JobSpec:
    written["workflow"] = {"environment": "guess_number"}
    (job,) = jobs_of(config_file.resolve(written).config, RUN)
    return job._replace(plan=job.plan.model_copy(update={"planning": "stream", **changes}))


def manifest(job: JobSpec, num_trajectories: int, name: str = "rl") -> BatchPlanned:
    size = job.plan.num_generations
    members: list[BatchMember] = []
    for number in range(num_trajectories):
        group = ids.group_id(RUN, name, 99_999, number // size)
        rollout = ids.rollout_id(group, number % size, 0)
        members.append(
            BatchMember(
                trajectory_id=ids.trajectory_id(rollout, "agent"),
                rollout_id=rollout,
                group_id=group,
                digest="f" * 64,
                reward=-0.30000000000000004,
                staleness=0,
            )
        )
    return BatchPlanned(
        run_id=RUN,
        time_ms=2**41,
        batch_id=ids.batch_id(job.job_id, 99_999),
        job_id=job.job_id,
        model_group=job.model_group,
        epoch=99_999,
        index=99_999,
        trains_at_version=99_999,
        yields_version=100_000,
        members=tuple(members),
        seed=2**63 - 1,
        curriculum_sha256="f" * 64,
        previous_sha256="f" * 64,
        locators=tuple(Locator(partition=15, offset=10**9 + n) for n in range(num_trajectories)),
    )


@pytest.mark.parametrize(("behind", "at_least"), [("", 3000), (WRITTEN, 2700)], ids=["own", "written"])
def test_the_largest_batch_that_is_taken_has_a_manifest_that_a_record_holds(
    written: dict[str, Any], behind: str, at_least: int
) -> None:
    job = job_of(written, num_generations=16)
    most = most_trajectories(job, behind)
    assert at_least < most < 4000
    encoded = codec.encode(manifest(job, most, f"rl{behind}"))
    check_record_size("batches", encoded.key, encoded.value, encoded.headers)


def test_names_count_as_the_bytes_that_they_have_in_a_record() -> None:
    most = [
        most_members("r/rl", agents, epoch=1, index=1, member=1, max_staleness=0)
        for agents in (["ü" * 40], ["ü" * 40, "a" * 60], ["a" * 80])
    ]
    assert len(set(most)) == 1


def test_a_batch_that_no_manifest_has_room_for_is_refused_by_number(written: dict[str, Any]) -> None:
    check_manifests([job_of(written, tasks_per_epoch=128, num_generations=16)])
    check_manifests([job_of(written, tasks_per_epoch=512, num_generations=16, batches_per_epoch=4, max_staleness=3)])
    with pytest.raises(ConfigError, match=rf"job {RUN}/rl: a batch of 8192 trajectories .* exceeds the 3\d\d\d "):
        check_manifests([job_of(written, tasks_per_epoch=512, num_generations=16)])


@pytest.mark.parametrize("num", [1, 6, 12])
def test_rollouts_that_do_not_fill_their_tree_are_refused(written: dict[str, Any], num: int) -> None:
    written["trajectory_builders"]["b"] |= {"responses_per_step": 2}
    check_manifests([job_of(written, num_generations=8)])
    with pytest.raises(ConfigError, match=rf"job {RUN}/rl: {num} rollouts per task do not fill a tree with 2 answers"):
        check_manifests([job_of(written, num_generations=num)])


def test_a_tree_of_which_only_a_part_would_be_waited_for_is_refused(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"] |= {"responses_per_step": 2, "oversampling": 1}
    with pytest.raises(ConfigError, match="oversampling has no meaning where responses_per_step is above 1"):
        job_of(written, num_generations=8)


def test_more_rollouts_than_a_group_may_have_are_refused(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"] |= {"oversampling": 4089}
    with pytest.raises(ConfigError, match="num_generations and oversampling exceed 4096 together; lower oversampling"):
        job_of(written, num_generations=8)


def closed_group(job: JobSpec, size: int) -> GroupClosed:
    """Each member was made at the third attempt."""
    group = ids.group_id(RUN, "rl", 99_999, 99_999)
    members, attempts = [], []
    for member in range(size):
        *failed, made = (ids.rollout_id(group, member, attempt) for attempt in range(3))
        members.append(
            MemberRef(
                trajectory_id=ids.trajectory_id(made, "agent"),
                rollout_id=made,
                agent="agent",
                member=member,
                digest="f" * 64,
                reward=-0.30000000000000004,
                num_tokens=32_000,
                num_completion_tokens=16_000,
                min_version=99_999,
                max_version=99_999,
            )
        )
        for attempt, rollout_id in enumerate(failed):
            attempts.append(
                AttemptOutcome(rollout_id=rollout_id, member=member, attempt=attempt, outcome="failed", cause="timeout")
            )
        attempts.append(
            AttemptOutcome(rollout_id=made, member=member, attempt=2, outcome="complete", num_tokens=32_000)
        )
    return GroupClosed(
        run_id=RUN, time_ms=2**41, group_id=group, example_id="e" * 64, job_id=job.job_id, epoch=99_999, index=99_999,
        purpose="train", policy="model", reason="complete", is_viable=True, size=size, members=tuple(members),
        attempts=tuple(attempts), steps_at=StepsRange(partition=15, first_offset=10**9, last_offset=10**9),
        locators=tuple(Locator(partition=15, offset=10**9 + n) for n in range(size)),
    )  # fmt: skip


def test_the_largest_group_that_is_taken_has_a_record(written: dict[str, Any]) -> None:
    job = job_of(written, num_generations=MAX_GROUP, tasks_per_epoch=1)
    check_manifests([job])
    encoded = codec.encode(closed_group(job, MAX_GROUP))
    check_record_size("groups", encoded.key, encoded.value, encoded.headers)


def test_the_largest_group_of_a_league_has_a_record(written: dict[str, Any]) -> None:
    size = MAX_GROUP // 2
    whole = closed_group(job_of(written, num_generations=size, tasks_per_epoch=1), size)
    player = ids.player(ids.model_group(RUN, "policy"), 99_999)
    players: dict[str, str] = dict.fromkeys(("first_agent", "other_agent"), player)
    matches = tuple(
        MatchResult(member=member, players=players, scores=dict.fromkeys(players, -0.30000000000000004))
        for member in range(size)
    )
    changes = {"members": whole.members * 2, "locators": whole.locators * 2, "matches": matches}
    encoded = codec.encode(whole.model_copy(update=changes))
    check_record_size("groups", encoded.key, encoded.value, encoded.headers)


def test_a_larger_group_is_refused_by_number(written: dict[str, Any]) -> None:
    job = job_of(written, num_generations=MAX_GROUP // 2 + 1, tasks_per_epoch=1)
    check_manifests([job])
    two_agents = job._replace(rollout=job.rollout.model_copy(update={"agents": {"a": "g", "b": "g"}}))
    for planning in ("stream", "submitted"):
        spec = two_agents._replace(plan=job.plan.model_copy(update={"planning": planning}))
        with pytest.raises(
            ConfigError, match=rf"job {RUN}/rl: a group of 770 trajectories .* exceeds the maximum of 768"
        ):
            check_manifests([spec])


def test_more_rollouts_than_a_closing_can_name_are_refused(written: dict[str, Any]) -> None:
    many_attempts = job_of(written, num_generations=8)
    rollout = many_attempts.rollout.model_copy(update={"max_attempts": 1000})
    largest = job_of(written, num_generations=MAX_GROUP, tasks_per_epoch=1)
    check_attempts([largest, many_attempts._replace(rollout=rollout)])
    with pytest.raises(
        ConfigError, match=r"the closing of a group of 8192 rollouts would have .* lower num_generations"
    ):
        check_attempts([job_of(written, num_generations=8, oversampling=8184)])


def test_a_run_with_such_a_batch_is_not_begun(written: dict[str, Any], tmp_path: Path) -> None:
    written["workflow"] = {"environment": "guess_number"}
    written["trainer_adapters"]["a"]["tasks_per_epoch"] = 1000
    opening = new_run(MemoryLog(num_partitions=2), ArtifactStore(str(tmp_path)), config_file.resolve(written), "run")
    with pytest.raises(ConfigError, match="a batch of 8000 trajectories"):
        asyncio.run(opening)


def test_a_run_whose_epoch_no_manifest_has_room_for_is_not_begun(
    written: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written["workflow"] = {"environment": "guess_number"}
    written["trainers"]["t"] = {"_type": "rollstream", "planning": "submitted"}
    written["trainer_adapters"]["a"]["max_staleness"] = 0
    written["trajectory_builders"]["b"]["num_generations"] = 2
    examples = [Example(f"{number}", {}) for number in range(2400)]

    def opening(some: list[Example]) -> RunPlan:
        log, store = MemoryLog(num_partitions=2), ArtifactStore(str(tmp_path))
        return asyncio.run(new_run(log, store, config_file.resolve(written), "run", examples=some))

    assert opening(examples[:1000]).is_new
    with pytest.raises(ConfigError, match=r"an epoch of 4800 trajectories .* exceeds the \d+ that fit"):
        opening(examples)
    written["finetuning"]["curriculum_learning"] = {"enabled": True}
    assert opening(examples).is_new
    assert "the run fails if the curriculum" in caplog.text


def test_a_run_with_a_task_above_the_limit_of_its_topic_is_not_begun(written: dict[str, Any], tmp_path: Path) -> None:
    written["workflow"] = {"environment": "guess_number"}
    written["trajectory_builders"]["b"]["environment_config"] = {"table": "x" * 560 * 1024}
    examples = [Example("small", {}), Example("large", {"text": "x" * 500 * 1024})]

    def opening(some: list[Example]) -> RunPlan:
        log, store = MemoryLog(num_partitions=2), ArtifactStore(str(tmp_path))
        return asyncio.run(new_run(log, store, config_file.resolve(written), "run", examples=some))

    assert opening(examples[:1]).is_new
    with pytest.raises(
        ConfigError, match=r"/rl: the task of example 'large' would have 108\d{4} bytes, more than the 1048576"
    ):
        opening(examples)
