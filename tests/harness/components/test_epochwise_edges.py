"""Rare cases of runs by components: repeated writes, and seals during a takeover."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness.components import epochs
from rollstream.harness.components.adapter import RollstreamTrainerAdapter
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.components.interfaces import Trainer
from rollstream.harness.components.submission import submitted_groups
from rollstream.harness.components.trainer import RollstreamTrainer
from rollstream.harness.config.components import (
    RollstreamTrainerAdapterConfig,
    RollstreamTrainerConfig,
    RollstreamTrajectoryBuilderConfig,
)
from rollstream.harness.recorded.tasks import MAX_INLINE_BYTES
from rollstream.harness.runs.run_handle import opened
from rollstream.schemas.errors import ConfigError, LogError
from rollstream.schemas.events import BatchPlanned, EpochSealed, SubmissionReceived, TaskRequested, TrajectoryRejected
from rollstream.schemas.finetuning import (
    DPOItem,
    FinetuneConfig,
    FinetuneRunConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from rollstream.schemas.settings import ModelSettings
from tests.rigs.remote_outage import RemoteFileSystem
from tests.rigs.runs.epochwise_rig import (
    Choosy,
    EpochwiseRig,
    answers_of,
    components_for,
    conducted,
    configuration,
    opened_rig,
    scored_configuration,
    submitting,
)


def shaped_evenly(group: list[Trajectory]) -> None:
    """Change what is trained on, so that the group is written to the log again."""
    for trajectory in group:
        trajectory.shaped_rewards = [0.25] * len(answers_of(trajectory))


def test_a_repeated_write_keeps_the_given_rewards_and_is_not_scored_again(tmp_path: Path) -> None:
    written = scored_configuration(tmp_path)

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
            changed = collection.trajectories[0]
            shaped_evenly(changed)
            for number, trajectory in enumerate(changed):
                trajectory.reward = number + 0.5
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
            status = await parts.trainer_adapter.wait_until_complete(ref)
            assert status.status == TrainingStatusEnum.COMPLETED
        (batch,) = await rig.events("batches", BatchPlanned)
        assert [member.reward for member in batch.members] == pytest.approx([t.reward for t in changed])

    asyncio.run(scenario())


PAIR = DPOItem(prompt="?", chosen_response="yes", rejected_response="no")


@pytest.mark.parametrize(
    ("episode", "size", "message"),
    [
        ([], 700, r"a submission of 3500 trajectories exceeds the [23]\d\d\d "),
        ([PAIR], 500, r"a submission of 5000 trajectories exceeds the [23]\d\d\d "),
        ([], 769, "a group of 769 .* the maximum of 768"),
    ],
    ids=["trajectories", "pairs", "a group"],
)
def test_more_than_a_record_has_room_for_is_refused_before_anything_is_written(
    tmp_path: Path, episode: list[Any], size: int, message: str
) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            group = [Trajectory(episode=episode, reward=1.0)] * size
            num_groups = 1 if size > 768 else 5
            with pytest.raises(ConfigError, match=message):
                await parts.trainer_adapter.submit(
                    TrajectoryCollection(trajectories=[group] * num_groups, run_id="mine")
                )
        assert await rig.events("groups", SubmissionReceived) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("reward", [float("nan"), -1e200])
def test_a_reward_that_no_statistics_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, reward: float
) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            group = [Trajectory(episode=[], reward=one) for one in (0.0, reward)]
            with pytest.raises(ConfigError, match=r"the reward of a trajectory is .*; expected a number up to 1e"):
                await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[group], run_id="mine"))
        assert await rig.events("groups", SubmissionReceived) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("more", ["!", "!" * MAX_INLINE_BYTES], ids=["inline", "in a store that is away for a while"])
def test_an_answer_whose_text_was_changed_is_not_trained_on_by_the_tokens_of_another(tmp_path: Path, more: str) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        rig.artifacts = ArtifactStore(f"remote://{tmp_path.name}", cache=tmp_path / "cache")
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
            changed = collection.trajectories[0]
            for item in answers_of(changed[1]):
                item.content = f"{item.content}{more}"
            RemoteFileSystem.num_failures = len(more) > 1
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
            await parts.trainer_adapter.wait_until_complete(ref)
        (batch,) = await rig.events("batches", BatchPlanned)
        rejected = await rig.events("batches", TrajectoryRejected)
        assert ["/m0/" in batch.members[0].rollout_id, "/m2/" in batch.members[1].rollout_id] == [True, True]
        again = [event for event in rejected if event.group_id == batch.members[0].group_id]
        assert [(event.cause, "/m1/" in event.rollout_id) for event in again] == [("no_token_ids", True)]
        assert RemoteFileSystem.num_failures == 0

    asyncio.run(scenario())


def test_a_run_that_goes_on_waits_for_the_seal_of_what_was_submitted(tmp_path: Path) -> None:
    """The process was killed between a submission and its seal, which comes while the run is taken up again."""

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=2, num_examples=2))
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
        async with await rig.open_run(resume=True) as handle:  # no services: nothing answers
            groups = await submitted_groups(handle, 0, collection.trajectories)
            await epochs.submit(handle, 0, groups)
        parts = components_for(rig)
        start_run = parts.trajectory_builder.start_run

        async def late(run_id, meta=None):
            while not await rig.events("batches", EpochSealed):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await start_run(run_id, meta)

        parts.trajectory_builder.start_run = late
        async with asyncio.timeout(20):
            progress = await conducted(rig, resume=True, parts=parts)
        assert progress.job("run-1/rl").outcome == "succeeded"
        seals = await rig.events("batches", EpochSealed)
        assert [seal.epoch for seal in seals] == [0, 1]

    asyncio.run(scenario())


def test_a_run_whose_last_epoch_is_sealed_already_is_only_brought_to_its_end(tmp_path: Path) -> None:
    """It was ended early, and killed before that was written as the run's end."""

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=4, num_examples=2))
        async with opened_rig(rig) as (handle, _):
            await handle.begin()
            await epochs.submit(handle, 0, (), is_last=True)
            await epochs.sealed(handle, 0)
        progress = await conducted(rig, resume=True)
        assert progress.job("run-1/rl").outcome == "failed"  # nothing was submitted
        seals = await rig.events("batches", EpochSealed)
        assert [seal.epoch for seal in seals] == [0]

    asyncio.run(scenario())


def test_a_run_that_cannot_be_followed_leaves_its_workspace_to_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        handle = await rig.open_run()
        read, rig.log.reader = rig.log.reader, unreachable
        with pytest.raises(LogError, match="no broker"):
            await handle.start()
        assert opened(tmp_path) is None
        rig.log.reader = read
        async with await rig.open_run("run-2") as other:
            assert opened(tmp_path) is other

    asyncio.run(scenario())


async def unreachable(*_: Any, **__: Any) -> Any:
    raise LogError("no broker")


@pytest.mark.parametrize("has_curriculum", [True, False])
def test_trajectories_that_a_builder_leaves_out_are_not_attributed_to_the_curriculum(
    tmp_path: Path, has_curriculum: bool
) -> None:
    curriculum = {"enabled": has_curriculum, "initial_percentile": 0.5, "min_reward_diff": 0.0}
    rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=2, curriculum_learning=curriculum))
    parts = components_for(rig)
    parts = parts._replace(trajectory_builder=Choosy(parts.trajectory_builder.trajectory_builder_config))

    async def scenario() -> None:
        await conducted(rig, parts=parts)
        rejected = await rig.events("batches", TrajectoryRejected)
        causes = Counter(one.cause for one in rejected if one.cause in ("curriculum", "not_submitted"))
        expected = {"not_submitted": 2 * 4} | ({"curriculum": 2 * 2 * 2} if has_curriculum else {})
        assert causes == expected

    asyncio.run(scenario())


class OtherTrainer(Trainer):
    """Keeps the first two members of every group, and the first two groups of every epoch: by its curriculum, or
    without reporting it.
    """

    tells = True

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        assert self.trajectory_builder is not None
        assert self.trainer_adapter is not None
        await self.trajectory_builder.start_run(run_id, {"epoch": epoch})
        found = await self.trajectory_builder.finalize(run_id)
        kept = TrajectoryCollection(trajectories=[group[:2] for group in found.trajectories], run_id=run_id)
        choose = self.apply_curriculum_learning if self.tells else type(self).apply_curriculum_learning.__get__(self)
        kept = choose(trajectory_collection=kept, epoch=epoch)
        return await self.trainer_adapter.submit(kept)

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        groups = [[one.model_copy() for one in group] for group in trajectory_collection.trajectories[:2]]
        return TrajectoryCollection(trajectories=groups, run_id=trajectory_collection.run_id)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        assert self.trainer_adapter is not None
        statuses: list[TrainingJobStatus] = []
        for epoch in range(num_epochs):
            ref = await self.run_epoch(epoch, "theirs")
            assert ref is not None
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
        return statuses

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {}

    async def cleanup(self) -> None:
        pass

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


@pytest.mark.parametrize(
    ("tells", "expected"), [(True, {"not_submitted": 2 * 4, "curriculum": 2 * 4}), (False, {"not_submitted": 2 * 8})]
)
def test_trajectories_that_another_trainer_leaves_out_have_their_own_cause(
    tmp_path: Path, tells: bool, expected: dict[str, int]
) -> None:
    rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=2, curriculum_learning={"enabled": True}))
    parts = components_for(rig)
    trainer = OtherTrainer(TrainerConfig())
    trainer.tells = tells
    parts = parts._replace(trainer=trainer)

    async def scenario() -> None:
        await conducted(submitting(rig), parts=parts)
        rejected = await rig.events("batches", TrajectoryRejected)
        assert Counter(one.cause for one in rejected if one.cause != "zero_variance") == expected

    asyncio.run(scenario())


def test_validation_reads_the_columns_that_the_runs_dataset_names_and_ignores_its_filter(tmp_path: Path) -> None:
    run = {"validation_dataset": str(tmp_path / "named.jsonl"), "validation_interval": 1}
    written = configuration(tmp_path, num_epochs=1, run_configuration=run)
    rows = [{"uid": f"{number}-x", "ask": "guess", "secret": number} for number in range(2)]
    (tmp_path / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = written["eval"]["general"]["dataset"]
    section |= {
        "id_key": "uid",
        "structure": {"question_key": "ask"},
        "filter": {"denylist": {"field": {"uid": ["*-x"]}}},
    }
    trained = [{"uid": str(number), "ask": "guess", "secret": number} for number in range(2)]
    Path(section["file_path"]).write_text("".join(json.dumps(row) + "\n" for row in trained))

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        await conducted(rig)
        tasks = [task for task in await rig.events("tasks", TaskRequested) if task.purpose == "validation"]
        assert sorted((task.example_id, task.inputs["question"]) for task in tasks) == [
            ("0-x", "guess"),
            ("1-x", "guess"),
        ]

    asyncio.run(scenario())
    (row,) = json.loads((tmp_path / "output" / "validation_history.json").read_text())
    assert row["num_examples"] == 2


def test_only_an_unknown_error_of_a_validation_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [ConfigError("line 3 has no key 'id'"), KeyError("score")]

    class Failing(RollstreamTrajectoryBuilder):
        async def run_eval(self) -> Any:
            raise errors.pop(0)

    async def scenario() -> None:
        trainer = RollstreamTrainer(RollstreamTrainerConfig())
        builder = Failing(RollstreamTrajectoryBuilderConfig())
        await trainer.bind_components(
            builder, RollstreamTrainerAdapter(RollstreamTrainerAdapterConfig(model=ModelSettings(path="m")))
        )
        trainer.run_config = FinetuneConfig(run_configuration=FinetuneRunConfig(validation_dataset="v.json"))
        for epoch in range(2):
            await trainer.run_validation_evaluation(epoch, "run-1")

    asyncio.run(scenario())
    assert [record.exc_info is None for record in caplog.records] == [True, False]


@pytest.mark.parametrize("fails", [False, True])
def test_metrics_of_a_trainer_are_logged_and_their_failure_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    class Measured(OtherTrainer):
        async def get_metrics(self, run_id: str) -> dict[str, Any]:
            return {"run_id": run_id, "loss": 1 / (0 if fails else 4)}

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=1))
        parts = components_for(rig)._replace(trainer=Measured(TrainerConfig()))
        assert (await conducted(rig, parts=parts)).job("run-1/rl").outcome == "succeeded"

    with caplog.at_level("INFO"):
        asyncio.run(scenario())
    metrics = "metrics of run theirs: {'run_id': 'theirs', 'loss': 0.25}"
    reported = "run=theirs: the trainer's get_metrics failed: ZeroDivisionError" if fails else metrics
    assert reported in caplog.text
