"""The documented members of a shared model group: agents, parameters, checkpoints, readiness, switching."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.learner.shared_model_group import (
    GroupAgent,
    JobStateError,
    SharedAgentParams,
    SharedModelGroup,
    SharedModelGroupState,
)
from rollstream.learner.shared_model_group.parameters import FineTuneOptions, job_settings
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    JobFailed,
    JobProgressed,
    JobSkipped,
    JobSubmitted,
    JobSucceeded,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.settings import ArtifactRef
from tests.rigs.runs.group_rig import GROUP, NAME, RUN, GroupRig, chat_rollout

SFT = {"prover": [chat_rollout("1"), chat_rollout("2")]}


def made(rig: GroupRig, agents: list[GroupAgent], **changes: Any) -> SharedModelGroup:
    """A group that is not open."""
    keywords: dict[str, Any] = {"run_id": RUN, "group_name": NAME, **changes}
    return SharedModelGroup(rig.log, ArtifactStore(rig.artifact_uri), agents, **keywords)


async def finish(rig: GroupRig, job_id: str, version: int) -> None:
    """Write a learner's events for a finished job."""
    common = {"run_id": RUN, "time_ms": 1, "job_id": job_id, "model_group": GROUP}
    ref = ArtifactRef(uri="x", sha256="0" * 64, size_bytes=1)
    published = WeightsPublished(
        **common,
        batch_id=None,
        version=version,
        parent=None,
        term=0,
        weights_sha256="0" * 64,
        weights_format="full",
        base_model="m",
        artifact=ref,
    )
    await rig.log.send(published)
    await rig.log.send(JobProgressed(**common, version=version, percent=100.0))
    await rig.log.send(JobSucceeded(**common, final_version=version))


def test_agents_have_the_ids_of_the_protocol_and_the_order_of_the_group(rig: GroupRig) -> None:
    names = ("judge", "verifier", "prover")
    group = made(rig, rig.agents(), agent_names=names, max_message_rounds=7)
    assert list(group.agent_ids_and_names()) == [(2, "prover"), (1, "verifier")]
    assert (group.max_message_rounds, group.model_group, group.is_trainable) == (7, GROUP, True)
    assert all(agent.group is group for agent in group.agents.values())


def test_an_agent_without_a_group_has_one_of_its_own_name(rig: GroupRig) -> None:
    group = made(rig, [GroupAgent("solo", rig.params())], group_name="solo")
    assert list(group.agent_ids_and_names()) == [(0, "solo")]


def agents_of_another_group(rig: GroupRig) -> list[GroupAgent]:
    return [GroupAgent("prover", rig.params(), "others")]


def agents_without_group(rig: GroupRig) -> list[GroupAgent]:
    return [GroupAgent("prover", rig.params())]


def agents_with_other_ranks(rig: GroupRig) -> list[GroupAgent]:
    return [GroupAgent("a", rig.params(), NAME), GroupAgent("b", rig.params(lora_rank=8), NAME)]


def agents_grouped_before(rig: GroupRig) -> list[GroupAgent]:
    agents = rig.agents()
    made(rig, agents)
    return agents


def agents_of_one_name(rig: GroupRig) -> list[GroupAgent]:
    return rig.agents(("prover", "prover"))


def no_agents(rig: GroupRig) -> list[GroupAgent]:
    return []


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        (agents_of_another_group, "agent prover is of model group others; it cannot be in model group players"),
        (agents_without_group, "agent prover has no shared_model_group; it cannot be in model group players"),
        (agents_with_other_ranks, "model group players: lora_rank is 64 for agent a and 8 for agent b"),
        (agents_grouped_before, "agent prover already belongs to model group players; close that group"),
        (agents_of_one_name, "model group players: two agents are called prover"),
        (no_agents, "model group players has no agents"),
    ],
)
def test_agents_that_cannot_share_a_model_are_refused(
    rig: GroupRig, agents: Callable[[GroupRig], list[GroupAgent]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(rig, agents(rig))


def test_an_agent_that_the_protocol_does_not_have_is_refused(rig: GroupRig) -> None:
    with pytest.raises(ConfigError, match="agent verifier is not an agent of the protocol; its agents are prover"):
        made(rig, rig.agents(), agent_names=("prover",))


@pytest.mark.parametrize(
    ("given", "alpha"),
    [
        ({}, 64),
        ({"lora_rank": 8, "lora_alpha_scale": 1.5}, 12),
        ({"lora_alpha": 5}, 5),
        ({"lora_alpha": 5, "lora_alpha_scale": None}, 5),
    ],
)
def test_alpha_is_given_or_scale_times_rank(rig: GroupRig, given: dict[str, Any], alpha: int) -> None:
    found = made(rig, rig.agents(**given)).lora_alpha
    assert found == alpha
    assert isinstance(found, int)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_alpha": 5, "lora_alpha_scale": 1.0}, "both given"),
        ({"lora_alpha": None, "lora_alpha_scale": None}, "neither lora_alpha nor lora_alpha_scale"),
        ({"lora_rank": 3, "lora_alpha_scale": 0.5}, "0.5 x lora_rank 3 is 1.5; choose them so"),
    ],
)
def test_alpha_that_is_not_one_whole_number_is_refused(rig: GroupRig, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = made(rig, rig.agents(**given)).lora_alpha


def test_epochs_and_learning_rate_follow_the_agents(rig: GroupRig) -> None:
    plain = made(rig, rig.agents(), options=rig.options(num_epochs=3))
    assert (plain.num_epochs, plain.rl_learning_rate) == (3, 1e-2)
    scaled = made(rig, rig.agents(num_epochs=2, agent_lr_factor=0.5), options=rig.options(num_epochs=3))
    assert (scaled.num_epochs, scaled.rl_learning_rate) == (2, 5e-3)


def test_lora_and_learning_rate_reach_the_job(rig: GroupRig) -> None:
    async def body() -> None:
        agents = rig.agents(use_lora=True, lora_rank=4, lora_alpha_scale=2.0, agent_lr_factor=2.0)
        async with await rig.open(agents) as group:
            await group.create_supervised_fine_tune_job(SFT, job_name="iteration 3")
        (job,) = await rig.events("jobs", JobSubmitted)
        lora, fine_tune = job.settings.model.lora, job.fine_tune
        assert (lora.rank, lora.alpha, lora.dropout, job.settings.optimizer.learning_rate) == (4, 8.0, 0.05, 2e-2)
        assert (fine_tune.name, fine_tune.agents, fine_tune.num_examples) == ("iteration 3", ("prover", "verifier"), 2)

    asyncio.run(body())


def test_a_closed_group_releases_its_agents_and_refuses_calls(rig: GroupRig) -> None:
    async def body() -> None:
        agents = rig.agents()
        async with await rig.open(agents) as group:
            assert agents[0].model_name == group.model_name == str(rig.model)
        with pytest.raises(JobStateError, match="the group is not open"):
            await group.switch_to_next_model()
        async with await rig.open(agents) as again:
            assert agents[0].group is again

    asyncio.run(body())


def test_the_model_changes_for_all_agents_at_the_switch_and_switching_again_changes_nothing(rig: GroupRig) -> None:
    async def body() -> None:
        agents = rig.agents()
        async with await rig.open(agents) as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
            await finish(rig, job_id, 1)
            assert await group.get_fine_tune_job_status() == "succeeded"
            assert await group.get_fine_tune_job_progress() == 100
            assert agents[0].model_name == str(rig.model)
            assert await group.switch_to_next_model() == await group.switch_to_next_model() == f"{GROUP}@1"
            assert [agent.model_name for agent in agents] == [f"{GROUP}@1"] * 2
            again = await group.create_supervised_fine_tune_job(SFT)
            assert again != job_id, "the parent version is another one"

    asyncio.run(body())


def test_a_checkpoint_goes_through_json_and_back(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            assert group.get_state() == SharedModelGroupState(None, None)
            first = await group.create_supervised_fine_tune_job(SFT)
            before = json.loads(json.dumps(group.get_state_dict()))
            await finish(rig, first, 1)
            await group.switch_to_next_model()
            after = group.get_state()
            assert after == SharedModelGroupState(first, f"{GROUP}@1")
            group.set_state(before)
            assert (group.model_name, group.fine_tune_job_id) == (str(rig.model), first)
            group.set_state(after)
            assert group.version == 1

    asyncio.run(body())


def test_a_restored_group_switches_to_the_model_of_its_own_job(rig: GroupRig) -> None:
    """The checkpoint is of the time before the first switch; a second one has followed it."""

    async def body() -> None:
        async with await rig.open() as group:
            first = await group.create_supervised_fine_tune_job(SFT)
            before = after = group.get_state()
            for version in (1, 2):
                assert group.fine_tune_job_id is not None
                await finish(rig, group.fine_tune_job_id, version)
                assert await group.switch_to_next_model() == f"{GROUP}@{version}"
                after = group.get_state()
                await group.create_supervised_fine_tune_job(SFT)
            group.set_state(before)
            assert await group.switch_to_next_model() == await group.switch_to_next_model() == f"{GROUP}@1"
            assert group.get_state() == SharedModelGroupState(first, f"{GROUP}@1")
            group.set_state(after)
            assert await group.switch_to_next_model() == f"{GROUP}@2"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({"fine_tune_job_id": "run-1/nothing"}, "job run-1/nothing does not exist; `rollstream jobs` lists all jobs"),
        ({"fine_tuned_model_name": f"{GROUP}@7"}, f"model {GROUP}@7 is not one that {GROUP} switched to"),
        ({"attempt": 1}, "a state of a shared model group has no key attempt"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(rig: GroupRig, checkpoint: dict[str, Any], message: str) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            with pytest.raises(ConfigError, match=message):
                group.set_state(checkpoint)

    asyncio.run(body())


def test_a_group_is_ready_once_an_engine_has_its_version(rig: GroupRig) -> None:
    async def body() -> None:
        loaded = {"run_id": RUN, "time_ms": 1, "model_group": GROUP, "engine": "engine-1"}
        async with await rig.open() as group:
            await group.wait_for_ready(timeout=0)
            await rig.log.send(WeightsLoaded(**loaded, version=0))
            await finish(rig, await group.create_supervised_fine_tune_job(SFT), 1)
            await group.switch_to_next_model()
            with pytest.raises(TimeoutError, match=f"version 1 of {GROUP} is not served after 0 s"):
                await group.wait_for_ready(timeout=0)
            await rig.log.send(WeightsLoaded(**loaded, version=1))
            await group.wait_for_ready()

    asyncio.run(body())


def test_modes_need_no_switching(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            await group.train()
            assert group.is_training_mode
            await group.eval()
            assert not group.is_training_mode

    asyncio.run(body())


def test_too_few_examples_skip_the_job_and_keep_the_model(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(min_examples=10) as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
            assert await group.get_fine_tune_job_status() == "succeeded"
            assert not await group.fine_tune_job_failed()
            reported = "skipped: 2 examples, at least 10 are needed; the model stays at version 0"
            assert await group.get_fine_tune_job_error_repr() == reported
            assert await group.switch_to_next_model() == str(rig.model)
            assert await group.create_supervised_fine_tune_job(SFT) == job_id
        assert len(await rig.events("jobs", JobSkipped)) == 1
        assert await rig.events("jobs", JobSubmitted) == []

    asyncio.run(body())


def test_a_job_past_its_deadline_is_cancelled(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(deadline_s=60.0) as group:
            await group.create_supervised_fine_tune_job(SFT)
            assert await group.get_fine_tune_job_status() == "pending"
            rig.now_ms += 60_001
            assert await group.get_fine_tune_job_status() == "cancelled"
            assert await group.get_fine_tune_job_error_repr() == "cancelled: its deadline of 60 s has passed"

    asyncio.run(body())


def test_params_of_agents_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        SharedAgentParams(model_name="m", lora_ranks=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(("given", "expected"), [({}, 3.0), ({"dual_clip": None}, None), ({"dual_clip": 5.0}, 5.0)])
def test_rl_jobs_have_the_dual_clip_of_new_runs_unless_the_options_set_another(
    given: dict[str, Any], expected: float | None
) -> None:
    options = FineTuneOptions(grpo=GrpoSettings(**given), mini_batches=2)
    settings = job_settings(SharedAgentParams(model_name="m", use_lora=False), options, "rl", 1)
    assert settings.algorithm == GrpoSettings(dual_clip=expected, mini_batches=2)


@pytest.mark.parametrize("is_progress_known", [True, False])
def test_a_retry_knows_a_version_that_came_after_the_attempt_before_it(rig: GroupRig, is_progress_known: bool) -> None:
    """The job is cancelled while its second batch is trained, and retried before that is published."""

    async def publish(job_id: str, version: int) -> None:
        common: dict[str, Any] = {"run_id": RUN, "time_ms": 1, "job_id": job_id, "model_group": GROUP}
        of_batch: dict[str, Any] = (
            {"batch_id": f"{job_id}/b{version}", "parent": version - 1}
            if version
            else {"batch_id": None, "parent": None}
        )
        await rig.log.send(
            WeightsPublished(
                **common, **of_batch, version=version, term=1, weights_sha256="0" * 64, weights_format="full",
                base_model="m", artifact=ArtifactRef(uri="00/0", sha256="0" * 64, size_bytes=1),
            )
        )  # fmt: skip
        if version and (version < 2 or is_progress_known):
            await rig.log.send(JobProgressed(**common, version=version, percent=10.0))

    async def body() -> None:
        async with await rig.open(batch_size=2) as group:
            first = await group.create_supervised_fine_tune_job({"prover": [chat_rollout(str(n)) for n in range(6)]})
            await publish(first, 0)
            await publish(first, 1)
            await group.cancel_fine_tune_job()
            second = await group.retry_fine_tune_job()
            await publish(first, 2)
            await rig.log.send(
                JobFailed(run_id=RUN, time_ms=1, job_id=second, model_group=GROUP, error="another job has published")
            )
            third = await group.retry_fine_tune_job()
            submitted = {job.job_id: job for job in await rig.events("jobs", JobSubmitted)}
            found = [submitted[one] for one in (first, second, third)]
            ranges = [(one.base_version, one.fine_tune.first_batch, one.settings.num_versions) for one in found]
            assert ranges == [(0, 0, 3), (1, 1, 2), (2, 2, 1)], "each batch is trained once"

    asyncio.run(body())


def test_attempts_are_counted_from_the_newest_one_whichever_is_named(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            first = await group.create_supervised_fine_tune_job(SFT)
            attempts = [first]
            for named in (first, first, f"{first}-r1"):
                await group.cancel_fine_tune_job()
                attempts.append(await group.retry_fine_tune_job(named))
                assert await group.get_fine_tune_job_status() == "pending"
                assert await group.retry_fine_tune_job(named) == attempts[-1], "it is open"
            assert attempts == [first, f"{first}-r1", f"{first}-r2", f"{first}-r3"]
            await finish(rig, attempts[-1], 1)
            assert await group.retry_fine_tune_job(first) == attempts[-1], "it has succeeded"
            assert [job.job_id for job in group.jobs] == attempts

    asyncio.run(body())
