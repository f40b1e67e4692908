"""Bad input of a shared model group: each is one clear error, and nothing of it reaches the log."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Encoded, Position
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.upkeep.run_control import find_job
from rollstream.learner.shared_model_group import JobStateError, SharedModelGroup, fine_tune_job
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError, LogError
from rollstream.schemas.events import JobCancelled, JobFailed, JobSubmitted, TaskRequested
from rollstream.schemas.events.recorded import RecordedReward, RecordedRollout, RecordedStep, RecordedTokens
from rollstream.schemas.events.rollouts import VersionSpan
from tests.rigs.runs.group_rig import GROUP, WAIT_S, GroupRig, chat_rollout, sampled

Call = Callable[[SharedModelGroup], Awaitable[Any]]
SPAN = VersionSpan(model_group="run-9/policy", version=0, length=2)
OF_ANOTHER = RecordedRollout(steps=(RecordedStep(tokens=RecordedTokens.of([3], [4, 5], spans=(SPAN,))),))
OTHER_PROMPT = RecordedRollout(steps=(RecordedStep(tokens=RecordedTokens.of([4], [4, 5])),))
SAME = RecordedRollout(steps=(RecordedStep(tokens=RecordedTokens.of([3], [4, 5])),))
TOKENS = RecordedTokens.of([3], [4], [-0.5])
WITHOUT_REWARD = RecordedRollout(
    steps=(RecordedStep(tokens=TOKENS),), rewards=(RecordedReward(value=1.0, step=0, is_score=True),)
)


def sft(given: dict[str, Any], replaced: dict[str, Any] | None = None) -> Call:
    return lambda group: group.create_supervised_fine_tune_job(given, replaced)


def dpo(positive: dict[str, Any], negative: dict[str, Any]) -> Call:
    return lambda group: group.create_dpo_fine_tune_job(positive, negative)


def rl(given: dict[str, Any]) -> Call:
    return lambda group: group.create_rl_fine_tune_job(given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (sft({}), "the dataset is empty"),
        (sft({"prover": [RecordedRollout()]}), "the dataset is empty"),
        (sft({"judge": [chat_rollout("1")]}), "agent judge is not in the model group; its agents are prover, verifier"),
        (sft({"prover": [chat_rollout("1", None)]}), "agent prover, rollout 0: a message is None"),
        (sft({"prover": [OF_ANOTHER]}), f"sampled by model group run-9/policy, not by {GROUP}"),
        (sft({"prover": [RecordedRollout(error="cut off")]}), "rollout 0: the recorded rollout is broken: cut off"),
        (sft({}, {"prover": [(chat_rollout("1"), 1)]}), "agent prover is not a verifier; only a verifier's guesses"),
        (sft({}, {"verifier": [(chat_rollout("1"), 2)]}), "agent verifier: label 2 is not 0 or 1"),
        (sft({}, {"verifier": [(SAME, 1)]}), "rollout 0 with a replaced guess: its last trained message"),
        (dpo({}, {}), "the dataset is empty"),
        (dpo({"prover": [chat_rollout("1")]}, {"prover": []}), "1 positive and 0 negative examples"),
        (dpo({"judge": []}, {}), "agent judge is not in the model group"),
        (
            dpo({"prover": [chat_rollout("1", "2")]}, {"prover": [chat_rollout("1")]}),
            "example prover/0: the positive is of round 1, the negative of round 0",
        ),
        (dpo({"prover": [chat_rollout("1")]}, {"prover": [chat_rollout(None)]}), "rollout 0: a message is None"),
        (dpo({"prover": [SAME]}, {"prover": [OTHER_PROMPT]}), "positive and negative answer different prompts"),
        (dpo({"prover": [SAME]}, {"prover": [SAME]}), "same answer in 1 examples, .*: prover/0; give pairs"),
        (dpo({"prover": [chat_rollout("1")]}, {"prover": [chat_rollout("1")]}), "the same answer in 1 examples"),
        (dpo({"prover": [RecordedRollout()]}, {"prover": [SAME]}), "example 0: it has no message of the agent"),
        (rl({}), "the dataset is empty"),
        (rl({"prover": [[chat_rollout("1")]]}), "agent prover, group 0: a step has no tokens with log-probabilities"),
        (rl({"prover": [[WITHOUT_REWARD]] * 2}), "example prover/0: a rollout has no reward of the agent"),
        (rl({"prover": [[sampled(4, reward=1.0)] * 513]}), "has 513 rollouts, more than 512; split the group"),
        (
            rl({"prover": [[sampled(4, reward=1.0)] * 512] * 7}),
            r"a batch of 3584 rollouts exceeds the 2\d\d\d",
        ),
    ],
)
def test_bad_examples_are_refused_before_anything_is_written(rig: GroupRig, call: Call, message: str) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            with pytest.raises(ValueError, match=message):
                await call(group)
            assert (group.jobs, group.fine_tune_job_id) == ((), None)
        assert await rig.events("jobs") == []

    asyncio.run(body())


@pytest.mark.parametrize("changes", [{"batch_size": 2}, {"num_epochs": 2}], ids=["batches", "passes"])
def test_an_rl_job_whose_last_batch_would_be_stale_is_refused(rig: GroupRig, changes: dict[str, Any]) -> None:
    async def body() -> None:
        groups = [[sampled(8, reward=1.0), sampled(9, reward=0.0)]] * 3
        async with await rig.open(**changes) as group:
            with pytest.raises(ConfigError, match=r"last of 2 batches .* staleness of 1, more than .* \(0\)"):
                await group.create_rl_fine_tune_job({"prover": groups})
        async with await rig.open(**changes, max_staleness=1) as group:
            await group.create_rl_fine_tune_job({"prover": groups})
            await group.create_supervised_fine_tune_job({"prover": groups[0] * 3})
            assert len(group.jobs) == 2

    asyncio.run(body())


def test_a_job_of_an_earlier_release_that_would_be_refused_now_can_be_created_again(
    rig: GroupRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        groups = {"prover": [[WITHOUT_REWARD]] * 3}
        async with await rig.open(min_examples=4, batch_size=2) as group:
            skipped = await group.create_rl_fine_tune_job(groups)
        async with await rig.open(batch_size=2) as group:
            with pytest.raises(ConfigError, match="a rollout has no reward"):
                await group.create_rl_fine_tune_job(groups)
            assert group.fine_tune_job_id == skipped
            with monkeypatch.context() as earlier:
                earlier.setattr(fine_tune_job, "check_new", lambda *_: None)
                job_id = await group.create_rl_fine_tune_job(groups)
        async with await rig.open(batch_size=2) as group:
            assert await group.create_rl_fine_tune_job(groups) == job_id == f"{skipped}-r1"
            assert len(group.jobs) == 2

    asyncio.run(body())


def test_switching_while_a_job_runs_is_refused(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})
            with pytest.raises(JobStateError, match=f"job {job_id} is pending; switch once it has succeeded"):
                await group.switch_to_next_model()
            await group.cancel_fine_tune_job(cause="no longer wanted")
            with pytest.raises(JobStateError, match="is cancelled: cancelled: no longer wanted; switch once"):
                await group.switch_to_next_model()

    asyncio.run(body())


def test_only_a_failed_or_cancelled_job_is_tried_again(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})
            with pytest.raises(JobStateError, match=f"job {job_id} is pending; only a failed or cancelled job"):
                await group.retry_fine_tune_job()

    asyncio.run(body())


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.get_fine_tune_job_error_repr("run-1/nothing"),
        lambda group: group.get_fine_tune_job_progress("run-1/nothing"),
        lambda group: group.wait_for_fine_tune_job("run-1/nothing"),
        lambda group: group.cancel_fine_tune_job("run-1/nothing"),
        lambda group: group.retry_fine_tune_job("run-1/nothing"),
    ],
)
def test_an_unknown_job_is_refused(rig: GroupRig, call: Call) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            assert await group.get_fine_tune_job_status("run-1/nothing") == "not_found"
            assert await group.fine_tune_job_failed("run-1/nothing")
            with pytest.raises(
                JobStateError, match="job run-1/nothing does not exist; `rollstream jobs` lists all jobs"
            ):
                await call(group)

    asyncio.run(body())


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.get_fine_tune_job_status(),
        lambda group: group.get_fine_tune_job_error_repr(),
        lambda group: group.switch_to_next_model(),
    ],
)
def test_a_group_without_a_job_raises_an_error(rig: GroupRig, call: Call) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            with pytest.raises(JobStateError, match=f"model group {GROUP} has no job; create one first"):
                await call(group)

    asyncio.run(body())


def test_a_frozen_group_trains_nothing(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(rig.agents(freeze_agent=True)) as group:
            assert not group.is_trainable
            with pytest.raises(JobStateError, match=f"model group {GROUP} is frozen and cannot be trained"):
                await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})

    asyncio.run(body())


def test_a_run_that_has_ended_takes_no_jobs(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            await group.end_run()
            with pytest.raises(
                JobStateError, match=r"run run-1 has ended \(completed\); open the group in another run"
            ):
                await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})
        agents = rig.agents()
        with pytest.raises(ConfigError, match=r"run run-1 has ended \(completed\); begin another run"):
            await rig.open(agents)
        async with await rig.open(agents, run_id="run-2") as other:
            assert {agent.group for agent in agents} == {other}, "the group that failed has let go of them"
            with pytest.raises(ConfigError, match=r"already belongs to model group players; close that group"):
                await rig.open(agents)
            assert {agent.group for agent in agents} == {other}

    asyncio.run(body())


def test_a_run_that_has_ended_leaves_no_job_open_and_retries_none(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            first = await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})
            await group.cancel_fine_tune_job()
            second = await group.create_supervised_fine_tune_job({"prover": [chat_rollout("3"), chat_rollout("4")]})
            await group.end_run()
            num_records = len(await rig.events("jobs"))
            assert await group.wait_for_fine_tune_job(timeout=5) == "cancelled"
            assert await group.get_fine_tune_job_error_repr() == "cancelled: the run ended"
            for job_id in (first, second):
                with pytest.raises(
                    JobStateError, match=r"run run-1 has ended \(completed\); open the group in another run"
                ):
                    await group.retry_fine_tune_job(job_id)
                assert (await find_job(rig.log, job_id)).status == await group.get_fine_tune_job_status(job_id)
            await group.cancel_fine_tune_job(second)
        assert len(await rig.events("jobs")) == num_records, "nothing is written to a run that has ended"

    asyncio.run(body())


def test_a_group_that_cannot_be_opened_has_its_agents_again_when_it_is_tried_again(rig: GroupRig) -> None:
    async def body() -> None:
        agents = rig.agents()
        log = Unreachable()
        group = SharedModelGroup(log, ArtifactStore(rig.artifact_uri), agents, run_id="run-1", group_name="players")
        with pytest.raises(LogError, match="no broker"):
            async with group:
                raise AssertionError("it is open")
        assert {agent.group for agent in agents} == {None}
        log.is_reachable = True
        async with group:
            assert {agent.group for agent in agents} == {group}

    asyncio.run(body())


class Unreachable(MemoryLog):
    """A log that takes no record until it is told to."""

    is_reachable = False

    async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
        if not self.is_reachable:
            raise LogError("no broker")
        return await super().send(event, partition=partition)


def test_tokens_that_the_model_does_not_have_fail_the_job_with_the_reason(rig: GroupRig) -> None:
    async def body() -> None:
        foreign = RecordedRollout(steps=(RecordedStep(tokens=RecordedTokens.of([3], [30_000])),))
        async with rig.services(), await rig.open() as group:
            await group.create_supervised_fine_tune_job({"prover": [foreign, foreign]})
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "failed", group.jobs
            message = await group.get_fine_tune_job_error_repr()
            assert message.startswith("none of the 2 examples of batch 0 can be trained on; the first one failed:"), (
                message
            )
        assert len(await rig.events("jobs", JobFailed)) == 1

    asyncio.run(body())


def test_rollouts_that_are_too_old_fail_the_job_with_the_reason(rig: GroupRig) -> None:
    async def body() -> None:
        groups = [[sampled(8, 9, reward=1.0), sampled(10, 11, reward=0.0)] for _ in range(2)]
        async with rig.services(), await rig.open() as group:
            await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})
            await group.wait_for_fine_tune_job(timeout=WAIT_S)
            await group.create_rl_fine_tune_job({"prover": groups})
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "failed", group.jobs
            message = await group.get_fine_tune_job_error_repr()
            assert message.endswith("was sampled at version 0 and would train version 1; max_staleness is 0"), message

    asyncio.run(body())


def test_a_cancelled_job_leaves_nothing_open(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(learner=False), await rig.open() as group:
            await group.create_supervised_fine_tune_job({"prover": [chat_rollout("1"), chat_rollout("2")]})
            await group.cancel_fine_tune_job()
            await group.cancel_fine_tune_job()
            assert await group.get_fine_tune_job_status() == "cancelled"
            async with asyncio.timeout(WAIT_S):
                while not (await rig.events("batches")):
                    await asyncio.sleep(0.01)
        assert len(await rig.events("jobs", JobSubmitted, JobCancelled)) == 2
        assert len(await rig.events("tasks", TaskRequested)) == 2

    asyncio.run(body())
