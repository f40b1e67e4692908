"""Commands on a run that a shared model group began: its group is not RUN/policy, and it has no configuration file."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness.runs.follower import read_runs
from rollstream.harness.runs.plan import look_up
from rollstream.harness.runs.stored_config import check_stored
from rollstream.harness.upkeep.named_version import parse_target
from rollstream.harness.upkeep.rollback_request import rollback_request
from rollstream.harness.upkeep.run_control import stopped_line
from rollstream.harness.upkeep.run_tables import runs_table
from rollstream.replay.archive.export import export_run
from rollstream.schemas.errors import ConfigError, TruncatedError
from rollstream.schemas.events import JobProgressed, JobSucceeded, RunEnded, RunStarted, WeightsPublished
from tests.rigs.runs.group_rig import GROUP, RUN, GroupRig, chat_rollout


@pytest.fixture
def rig(tmp_path: Path) -> GroupRig:
    return GroupRig(tmp_path, tmp_path / "model")


async def trained(rig: GroupRig, *versions: int, publishes: bool = True) -> str:
    """A job that has yielded these versions, as a learner writes them; its id."""
    group = await rig.open()
    job_id = await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})
    await group.close()
    common: dict[str, Any] = {"run_id": RUN, "time_ms": 1, "job_id": job_id, "model_group": GROUP}
    for version in versions:
        artifact = ArtifactStore(rig.artifact_uri).put_bytes(b"%d" % version, ".safetensors")
        described: dict[str, Any] = {"weights_sha256": "0" * 64, "weights_format": "full", "base_model": "m"}
        if publishes:
            published = WeightsPublished(
                **common, **described, batch_id=None, version=version, parent=None, term=0, artifact=artifact
            )
            await rig.log.send(published)
        await rig.log.send(JobProgressed(**common, version=version, percent=100.0))
    return job_id


async def succeeded(rig: GroupRig, job_id: str, version: int) -> None:
    await rig.log.send(JobSucceeded(run_id=RUN, time_ms=1, job_id=job_id, model_group=GROUP, final_version=version))


async def refusal(rig: GroupRig, target: str) -> str:
    artifacts = ArtifactStore(rig.artifact_uri)
    with pytest.raises(ConfigError) as refused:
        await rollback_request(rig.log, artifacts, parse_target(target), reason="", time_ms=1)
    return str(refused.value)


def test_such_a_run_is_found_before_and_after_its_first_version_and_lists_its_groups_versions(rig: GroupRig) -> None:
    async def scenario() -> None:
        job_id = await trained(rig)
        assert (
            stopped_line(await look_up(rig.log, RUN))
            == f"run {RUN} stopped before its first version: nothing was trained"
        )
        assert await trained(rig, 0, 1, 2) == job_id
        progress = await look_up(rig.log, RUN)
        assert stopped_line(progress) == (
            f"run {RUN} stopped at version 2; its open jobs are cancelled, and its shared model group takes no further "
            "ones"
        )
        await succeeded(rig, job_id, 2)
        header, line = runs_table(await read_runs(rig.log)).splitlines()
        column = header.index("versions") + len("versions")
        assert line[:column].split()[-1] == "3"
        assert "  1 fine-tuning job (1 succeeded)  " in line
        assert job_id.partition("/")[2] not in line

    asyncio.run(scenario())


def test_a_version_that_was_trained_and_is_not_in_the_log_was_removed(rig: GroupRig) -> None:
    async def scenario() -> None:
        await trained(rig, 1, publishes=False)
        with pytest.raises(TruncatedError, match="topic weights"):
            await look_up(rig.log, RUN)

    asyncio.run(scenario())


def test_a_rollback_is_refused_with_a_fork_of_a_version_that_exists(rig: GroupRig) -> None:
    async def scenario() -> None:
        job_id = await trained(rig, 0, 1, 2)
        fork = f"begin a new run from it with `rollstream finetune --fork {GROUP}@1`"
        why = f"{GROUP}@1: jobs of a shared model group train it, and each begins with the newest version; "
        assert await refusal(rig, f"{GROUP}@1") == why + fork
        assert await refusal(rig, f"{GROUP}@7") == why.replace("@1", "@7") + f"{GROUP} has no version 7; it has 0 to 2"
        await succeeded(rig, job_id, 2)
        assert await refusal(rig, f"{GROUP}@1") == why + fork
        await rig.log.send(RunEnded(run_id=RUN, time_ms=1, cause="stopped"))
        assert await refusal(rig, f"{GROUP}@1") == f"{GROUP}@1: run {RUN} has ended (stopped); {fork}"

    asyncio.run(scenario())


def test_such_a_run_can_be_neither_resumed_nor_changed_as_it_has_no_configuration_file(rig: GroupRig) -> None:
    async def scenario() -> None:
        await (await rig.open()).close()
        (started,) = await rig.events("groups", RunStarted)
        for trust in (False, True):
            with pytest.raises(ConfigError, match=f"run {RUN} was begun by a shared model group .* no configuration"):
                check_stored(started.config, {}, run_id=RUN, trust=trust)

    asyncio.run(scenario())


def test_such_a_run_can_be_exported(rig: GroupRig, tmp_path: Path) -> None:
    async def scenario() -> None:
        await succeeded(rig, await trained(rig, 0, 1), 1)
        folder, artifacts = tmp_path / "export", ArtifactStore(rig.artifact_uri)
        manifest = await export_run(rig.log, RUN, folder, artifacts=artifacts, with_weights=True)
        assert {artifact.what for artifact in manifest.artifacts if artifact.file} >= {f"weights {GROUP} v1"}

    asyncio.run(scenario())
