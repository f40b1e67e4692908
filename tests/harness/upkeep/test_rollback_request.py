"""Records of `rollstream rollback`, and its refusals with their remedies."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.upkeep.named_version import Target, parse_target
from rollstream.harness.upkeep.rollback_request import rollback_request
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    RollbackRequested,
    RunEnded,
    WeightsCollected,
)

GROUP = "run-1/policy"


def planned(index: int, *, base: int = 0, adopts: int | None = None) -> BatchPlanned:
    return BatchPlanned(
        run_id="run-1",
        time_ms=1,
        batch_id=f"run-1/rl/b{index:06d}",
        job_id="run-1/rl",
        model_group=GROUP,
        epoch=0,
        index=index,
        trains_at_version=base + index,
        yields_version=base + index + 1,
        members=(),
        seed=0,
        curriculum_sha256="0" * 64,
        previous_sha256="0" * 64,
        adopts=adopts,
    )


class Lab:
    """A run whose job has versions 0 to 3, of which 4 are planned."""

    def __init__(self, folder: Path, script: SimpleNamespace) -> None:
        self.script = script
        self.log = MemoryLog(num_partitions=2)
        self.artifacts = ArtifactStore(str(folder / "artifacts"))
        self.refs: list[Any] = []

    async def begin(self, *, base: int = 0, published: int = 4, num_planned: int = 4) -> None:
        spec = self.script.job_spec(num_epochs=9)
        self.refs = [self.artifacts.put_bytes(b"%d" % version, ".safetensors") for version in range(base + published)]
        common: dict[str, Any] = {"run_id": "run-1", "time_ms": 1, "job_id": "run-1/rl", "model_group": GROUP}
        await self.log.send_all(
            [
                self.script.run_started(),
                JobSubmitted(**common, base_version=base, settings=spec.job),
                JobStarted(**common, base_version=base, plan=spec.plan, rollout=spec.rollout),
                *(
                    self.script.published(version, "run-1/rl").model_copy(update={"artifact": self.refs[version]})
                    for version in range(base + published)
                ),
                *(planned(index, base=base) for index in range(num_planned)),
            ]
        )

    async def request(self, target: str) -> RollbackRequested:
        wanted = parse_target(target)
        return await rollback_request(self.log, self.artifacts, wanted, reason="it collapsed", time_ms=7)

    async def refusal(self, target: str) -> str:
        with pytest.raises(ConfigError) as refused:
            await self.request(target)
        assert "\n" not in str(refused.value)
        return str(refused.value)


@pytest.fixture
def lab(tmp_path: Path, script: SimpleNamespace) -> Lab:
    return Lab(tmp_path, script)


@pytest.mark.parametrize(
    "text", ["run-1", "run-1@", "@3", "run-1@x", "run-1@-1", "run-1/@1", "/p@1", "a/b/c@1", "a b@1"]
)
def test_a_target_that_is_not_a_group_and_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"GROUP@VERSION, for example demo-1a2b3c@12 or demo-1a2b3c/policy@12"):
        parse_target(text)


def test_a_run_means_its_policy_and_a_model_group_is_named_behind_it() -> None:
    assert parse_target("run-1@12") == Target("run-1/policy", 12)
    assert parse_target("run-1/verifier@v3") == Target("run-1/verifier", 3)


def test_a_request_names_the_job_and_the_newest_planned_version(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin()
        request = await lab.request("run-1@2")
        assert request == await lab.request("run-1/policy@v2")
        assert (request.job_id, request.model_group, request.version) == ("run-1/rl", GROUP, 2)
        assert (request.after_version, request.reason, request.time_ms) == (4, "it collapsed", 7)
        assert (await lab.request("run-1@3")).version == 3, "version 4 is planned and not published yet"

    asyncio.run(scenario())


def test_an_unknown_run_group_or_version_is_refused_with_the_known_ones(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin()
        assert await lab.refusal("gone@1") == "run gone does not exist; `rollstream runs` lists all runs"
        assert await lab.refusal("run-1/verifier@1") == (
            "run-1/verifier@1: run run-1 trains no model group verifier; name one that it trains: run-1/policy"
        )
        assert await lab.refusal("run-1@9") == "run-1/policy@9: run-1/policy has no version 9; it has 0 to 3"

    asyncio.run(scenario())


def test_the_newest_version_and_one_of_an_earlier_job_are_refused(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin(base=2, published=3, num_planned=2)
        assert await lab.refusal("run-1@4") == ("run-1/policy@4: version 4 is the newest one; give an earlier version")
        assert await lab.refusal("run-1@1") == (
            "run-1/policy@1: job run-1/rl begins with version 2; begin a new run from it with "
            "`rollstream finetune --fork run-1@1`"
        )

    asyncio.run(scenario())


def test_a_run_or_job_that_is_over_is_refused_with_the_fork_as_remedy(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin()
        await lab.log.send(
            JobSucceeded(run_id="run-1", time_ms=1, job_id="run-1/rl", model_group=GROUP, final_version=4)
        )
        assert await lab.refusal("run-1@1") == (
            "run-1/policy@1: job run-1/rl has succeeded and no other job trains the model group now; begin a new run "
            "from it with `rollstream finetune --fork run-1@1`"
        )
        await lab.log.send(RunEnded(run_id="run-1", time_ms=1, cause="completed"))
        assert await lab.refusal("run-1@1") == (
            "run-1/policy@1: run run-1 has ended (completed); begin a new run from it with "
            "`rollstream finetune --fork run-1@1`"
        )

    asyncio.run(scenario())


def test_a_job_that_has_sealed_its_last_epoch_is_refused_with_the_fork_as_remedy(lab: Lab) -> None:
    seal: dict[str, Any] = {"num_groups": 1, "num_trained_groups": 1, "num_batches": 1, "next_batch_index": 4}
    seal |= {"run_id": "run-1", "time_ms": 1, "job_id": "run-1/rl", "zero_variance_groups": 0}
    seal |= {"curriculum_percentile": 1.0, "curriculum_sha256": "0" * 64}
    seal |= {"avg_reward": None, "filtered_avg_reward": None}

    async def scenario() -> None:
        await lab.begin()
        await lab.log.send(EpochSealed(**seal, epoch=0, is_last=False))
        assert (await lab.request("run-1@1")).version == 1
        await lab.log.send(EpochSealed(**seal, epoch=1, is_last=True))
        assert await lab.refusal("run-1@1") == (
            "run-1/policy@1: job run-1/rl has planned its last version and no other job trains the model group now; "
            "begin a new run from it with `rollstream finetune --fork run-1@1`"
        )
        lab.artifacts.remove(lab.refs[1])
        assert "--fork" not in await lab.refusal("run-1@1")

    asyncio.run(scenario())


def test_a_fork_is_advised_only_from_a_version_that_exists(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin()
        await lab.log.send(
            JobSucceeded(run_id="run-1", time_ms=1, job_id="run-1/rl", model_group=GROUP, final_version=4)
        )
        lab.artifacts.remove(lab.refs[1])
        for remedy in ("job run-1/rl has succeeded and no other job trains the model group now", "run run-1 has ended"):
            unknown, removed = await lab.refusal("run-1@9"), await lab.refusal("run-1@1")
            assert remedy in unknown
            assert unknown.endswith("; run-1/policy has no version 9; it has 0 to 3")
            assert removed.endswith("; choose a version whose is_collected in weight_versions is false")
            assert "--fork" not in unknown + removed
            await lab.log.send(RunEnded(run_id="run-1", time_ms=1, cause="completed"))

    asyncio.run(scenario())


def test_a_model_group_that_nobody_trains_here_is_refused(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin()
        for name, kind in (("judge", "frozen"), ("elsewhere", "external")):
            settings = lab.script.job_spec().job.model_copy(update={"kind": kind})
            common: dict[str, Any] = {"run_id": "run-1", "time_ms": 1, "base_version": 0, "settings": settings}
            await lab.log.send(JobSubmitted(**common, job_id=f"run-1/{name}", model_group=f"run-1/{name}"))
        assert await lab.refusal("run-1/judge@0") == (
            "run-1/judge@0: the model group is frozen and has one version only; name a model group that is trained"
        )
        assert await lab.refusal("run-1/elsewhere@0") == (
            "run-1/elsewhere@0: another training backend trains it, which keeps its own versions; roll back there"
        )

    asyncio.run(scenario())


def test_the_advice_for_another_model_group_is_a_fork_of_all_or_its_section() -> None:
    assert parse_target("run-1/verifier@3").fork == (
        "begin a new run with `rollstream finetune --fork run-1@3`, from that version of every model group, or with "
        "`model_groups.verifier.version: run-1/verifier@3`, from this one alone"
    )


def test_a_version_whose_weights_are_gone_is_refused_with_who_removed_them(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin()
        lab.artifacts.remove(lab.refs[1])
        assert (await lab.refusal("run-1@1")).startswith("run-1/policy@1: its weights were removed: ")
        collected = WeightsCollected(
            run_id="run-1",
            time_ms=1767322800000,
            model_group=GROUP,
            versions=(1,),
            weights_sha256=("0" * 64,),
            artifacts=(lab.refs[1],),
            by="learner-1",
        )
        before = datetime.now(UTC).replace(microsecond=0)
        await lab.log.send(collected)
        removed = await lab.refusal("run-1@1")
        begin, at = "run-1/policy@1: its weights were removed: collected by learner-1 at ", len("2026-01-02 03:00:00")
        assert removed.startswith(begin)
        written = datetime.strptime(removed.removeprefix(begin)[:at], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        assert before <= written <= datetime.now(UTC), "the record's wall-clock time, not the event's time"
        assert removed.removeprefix(begin)[at:] == (
            " UTC, because keep_last and keep_every do not cover it; choose a version whose is_collected in "
            "weight_versions is false"
        )

    asyncio.run(scenario())


def test_a_second_request_waits_for_the_first_but_the_same_one_is_repeated(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.begin()
        first = await lab.request("run-1@2")
        await lab.log.send(first)
        assert (await lab.request("run-1@2")).event_id == first.event_id
        assert await lab.refusal("run-1@1") == (
            "run-1/policy@1: a rollback to version 2 is already requested; repeat this one when `batches` shows it"
        )
        await lab.log.send(planned(4, adopts=2))
        again = await lab.request("run-1@1")
        assert (again.version, again.after_version) == (1, 5)

    asyncio.run(scenario())
