"""The trainer with builders and adapters of others: NAT's order of an epoch, its curriculum, files, and cleaning up."""

import asyncio
import json
import logging
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.harness import TrainerAdapter, TrajectoryBuilder
from rollstream.harness.components.adapter import RollstreamTrainerAdapter
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.components.history import EpochFiles
from rollstream.harness.components.interfaces import EvaluationItem, EvaluationOutput, EvaluatorOutput
from rollstream.harness.components.trainer import RollstreamTrainer
from rollstream.harness.config.components import (
    RollstreamTrainerAdapterConfig,
    RollstreamTrainerConfig,
    RollstreamTrajectoryBuilderConfig,
)
from rollstream.schemas.errors import ComponentError, EnvironmentRunError
from rollstream.schemas.finetuning import (
    CurriculumLearningConfig,
    EpisodeItem,
    EpisodeItemRole,
    FinetuneConfig,
    FinetuneRunConfig,
    RewardFunctionConfig,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from rollstream.schemas.settings import ModelSettings

ROLES = (EpisodeItemRole.USER, EpisodeItemRole.ASSISTANT)


def trajectory(example: str, reward: float) -> Trajectory:
    episode = [EpisodeItem(role=role, content="x", logprobs={}) for role in ROLES]
    return Trajectory(episode=episode, reward=reward, metadata={"id": example})


class Builder(TrajectoryBuilder):
    """Groups of given rewards in every epoch."""

    def __init__(self, groups: dict[str, tuple[float, ...]], calls: list[str]) -> None:
        super().__init__(TrajectoryBuilderConfig())
        self.groups, self.calls = groups, calls
        self.evaluation_runs: dict[str, Any] = {}
        self.scores: list[Any] = [0.25, 0.75]
        self.datasets: list[Any] = []

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self.calls.append(f"start {(meta or {})['epoch']}")

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        self.calls.append("finalize")
        groups = [[trajectory(name, reward) for reward in rewards] for name, rewards in self.groups.items()]
        return TrajectoryCollection(trajectories=groups, run_id=run_id)

    async def run_eval(self) -> Any:
        assert self.run_config is not None
        assert self.run_config.run_configuration is not None
        self.datasets.append(self.run_config.run_configuration.dataset)
        self.calls.append("validate")
        items = tuple(EvaluationItem(str(number), score) for number, score in enumerate(self.scores))
        return EvaluationOutput((("reward", EvaluatorOutput(items)),))

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


class Adapter(TrainerAdapter):
    """Completes whatever it is given, until it is told to fail."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(TrainerAdapterConfig())
        self.calls = calls
        self.submitted: list[list[str]] = []
        self.outcome = TrainingStatusEnum.COMPLETED

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.calls.append("submit")
        self.submitted.append([(group[0].metadata or {})["id"] for group in trajectories.trajectories])
        return TrainingJobRef(run_id=trajectories.run_id, backend="none")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=ref.run_id, backend="none", status=self.outcome, message="no memory")

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        self.calls.append("wait")
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A trainer, its builder and adapter, and what they were asked in order."""

    async def trained(
        groups: dict[str, tuple[float, ...]], curriculum: dict[str, Any] | None = None, **run: Any
    ) -> SimpleNamespace:
        calls: list[str] = []
        builder, adapter = Builder(groups, calls), Adapter(calls)
        trainer = RollstreamTrainer(RollstreamTrainerConfig())
        await trainer.bind_components(builder, adapter)
        config = FinetuneConfig(
            curriculum_learning=CurriculumLearningConfig(**(curriculum or {})),
            reward_function=RewardFunctionConfig(name="reward"),
            output_dir=tmp_path / "output",
            run_configuration=FinetuneRunConfig(**run),
        )
        await trainer.initialize(config)
        return SimpleNamespace(
            trainer=trainer, builder=builder, adapter=adapter, calls=calls, output=tmp_path / "output"
        )

    return trained


TEN = {f"x{number}": (number / 10, number / 10 + 0.5) for number in range(10)}


def test_the_curriculum_opens_in_the_sequence_that_nat_was_seen_to_follow(make: Any) -> None:
    async def scenario() -> None:
        found = await make(TEN, {"enabled": True})
        await found.trainer.run(21)
        assert [len(names) for names in found.adapter.submitted] == [3] * 4 + [5] * 5 + [7] * 5 + [9] * 5 + [10] * 2
        assert found.adapter.submitted[0] == ["x9", "x8", "x7"]
        state = found.trainer.get_curriculum_state()
        assert json.loads(json.dumps(state))["current_percentile"] == 1.0
        assert state["included_groups"] == sorted(TEN)
        rows = json.loads((found.output / "reward_history.json").read_text())
        percentiles = [round(row["curriculum_percentile"], 9) for row in rows]
        assert percentiles == [0.3] * 4 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0] * 2

    asyncio.run(scenario())


def test_an_epoch_goes_in_nats_order_and_validation_comes_first_where_it_is_due(make: Any) -> None:
    async def scenario() -> None:
        found = await make(TEN, validation_dataset=Path("valid.json"), validation_interval=2, dataset="train.json")
        statuses = await found.trainer.run(3)
        assert [status.status.value for status in statuses] == ["completed"] * 3
        epoch = ["finalize", "submit", "wait"]
        assert found.calls == ["validate", "start 0", *epoch, "start 1", *epoch, "validate", "start 2", *epoch]
        assert found.builder.datasets == ["valid.json", "valid.json"]
        assert found.trainer.run_config.run_configuration.dataset == "train.json"
        (first, second) = json.loads((found.output / "validation_history.json").read_text())
        assert (first["avg_reward"], first["min_reward"], first["num_examples"]) == (0.5, 0.25, 2)
        rewards = json.loads((found.output / "reward_history.json").read_text())
        assert all(datetime.fromisoformat(row["timestamp"]).tzinfo is not None for row in (first, second, *rewards))
        assert (first["dataset_type"], second["epoch"]) == ("validation", 2)
        assert (
            found.trainer.apply_curriculum_learning(one := TrajectoryCollection(trajectories=[], run_id="r"), 0) is one
        )

    asyncio.run(scenario())


def test_a_validation_without_a_score_is_an_error_and_no_reward(make: Any) -> None:
    async def scenario() -> None:
        found = await make(TEN, validation_dataset="valid.json", validation_interval=1)
        found.builder.scores = [1.0, None]
        await found.trainer.run(1)
        (row,) = json.loads((found.output / "validation_history.json").read_text())
        assert {row.pop("timestamp") and row.pop("run_id")} == {found.trainer._run_id}
        assert [*row.values()] == [0, "validation", "1 of 2 examples have no score (1: no score); have them scored"]
        with pytest.raises(EnvironmentRunError, match="has no score"):
            await found.builder.compute_reward(EvaluationItem("x", None))
        assert await found.builder.compute_reward(EvaluationItem("x", 0.5)) == 0.5

    asyncio.run(scenario())


def test_an_epoch_without_trajectories_is_completed_and_a_failed_one_ends_the_run(make: Any) -> None:
    async def scenario() -> None:
        empty = await make({})
        (status,) = await empty.trainer.run(1)
        assert (status.status.value, status.message) == ("completed", "No trajectories to train on")
        failing = await make(TEN)
        failing.adapter.outcome = TrainingStatusEnum.FAILED
        statuses = await failing.trainer.run(3)
        assert [status.status.value for status in statuses] == ["failed"]
        metrics = await failing.trainer.get_metrics("run")
        assert [job["message"] for job in metrics["jobs"]] == ["no memory"]

    asyncio.run(scenario())


def test_a_reward_that_is_not_a_number_is_refused_before_the_curriculum_filters(make: Any) -> None:
    async def scenario() -> None:
        found = await make({"a": (0.0, float("nan")), "b": (0.0, 1.0)}, {"enabled": True})
        with pytest.raises(ComponentError, match="epoch 0 has the reward nan"):
            await found.trainer.run(1)
        assert not found.adapter.submitted

    asyncio.run(scenario())


def test_cleaning_up_cancels_what_is_in_flight_and_hides_no_error(make: Any) -> None:
    async def scenario() -> None:
        found = await make(TEN)
        several = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(3)]
        jobs = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(2)]
        found.builder.evaluation_runs = {"one": several[0], "two": several[1:]}
        found.adapter.training_jobs = {"one": jobs[0], "two": [jobs[1]]}
        await found.trainer.cleanup()
        assert all(task.cancelled() for task in [*several, *jobs])

    asyncio.run(scenario())


def test_an_epoch_that_is_run_alone_is_remembered_in_nats_keys_and_ours(make: Any) -> None:
    async def scenario() -> None:
        found = await make(TEN)
        ref = await found.trainer.run_epoch(4, "run-1")
        metrics = await found.trainer.get_metrics("run-1")
        assert (metrics["run_id"], metrics["total_epochs"], metrics["num_epochs"]) == ("run-1", 1, 1)
        (job,) = metrics["jobs"]
        assert job["job_ref"] == ref.model_dump(mode="json")
        assert (job["status"]["status"], job["epoch"], job["message"]) == ("completed", 4, "no memory")

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_full_disk_at_the_output_folder_is_waited_for(
    make: Any, tmp_path: Path, small_disk: Any, caplog: pytest.LogCaptureFixture, num_before: int
) -> None:
    disk = small_disk(2)
    (tmp_path / "output").symlink_to(disk.folder)
    long_names = {f"{number}-{'x' * 3000}": (0.0, 1.0) for number in range(10)}

    async def scenario() -> None:
        found = await make(long_names, {"enabled": True}, validation_dataset="v.json")
        await found.trainer.run(num_before)
        disk.fill()
        running = asyncio.create_task(found.trainer.run(4))
        async with asyncio.timeout(120):
            while "No space left" not in caplog.text and not running.done():
                await asyncio.sleep(0.01)
            assert not running.done(), running
            disk.free()
            statuses = await running
            await found.trainer.cleanup()
        assert {status.status.value for status in statuses} == {"completed"}
        metrics = [json.loads(line) for line in (disk.folder / "training_metrics.jsonl").read_text().splitlines()]
        assert [row["epoch"] for row in metrics][-4:] == [0, 1, 2, 3]
        assert (disk.folder / "reward_plot.png").exists()

    asyncio.run(scenario())


def test_another_folder_for_what_is_logged_counts_for_that_call_alone(make: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        found, once = await make(TEN), tmp_path / "once"
        for epoch, folder in enumerate((None, None, str(once), None)):
            found.trainer.log_progress(epoch, {"avg_reward": 0.5, "curriculum_percentile": 1.0}, folder)
        await found.trainer.cleanup()
        folders = (found.output, once)
        lines = [(folder / "training_metrics.jsonl").read_text().splitlines() for folder in folders]
        assert [[json.loads(line)["epoch"] for line in one] for one in lines] == [[0, 1, 3], [2]]
        histories = [json.loads((folder / "reward_history.json").read_text()) for folder in folders]
        assert [[row["epoch"] for row in history] for history in histories] == [[0, 1, 2, 3], [0, 1, 2]]
        assert [(folder / "reward_plot.png").exists() for folder in folders] == [True, False]

    asyncio.run(scenario())


def test_an_uninitialized_trainer_raises_and_writes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        trainer = RollstreamTrainer(RollstreamTrainerConfig())
        for call in (trainer.run(1), trainer.run_epoch(0, "r"), trainer.run_validation_evaluation(0, "r")):
            with pytest.raises(RuntimeError, match=r"not initialized: call bind_components\(...\) and initialize"):
                await call
        with pytest.raises(RuntimeError, match="not initialized"):
            trainer.log_progress(0, {})
        await trainer.cleanup()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(scenario())


def test_the_error_of_a_builder_without_run_eval_names_the_remedy() -> None:
    class Plain(TrajectoryBuilder):
        """Has nothing but what every builder must have."""

        start_run, finalize = Builder.start_run, Builder.finalize
        log_progress = Builder.log_progress

    with pytest.raises(NotImplementedError, match=r"Plain has no run_eval.* derive it from RollstreamTraj"):
        asyncio.run(Plain(TrajectoryBuilderConfig()).run_eval())


def test_an_error_of_cleanup_is_raised_only_after_a_successful_run(make: Any) -> None:
    class Torn(Builder):
        """Its evaluations cannot be listed."""

        @property
        def evaluation_runs(self) -> dict[str, Any]:
            raise OSError("the disk is gone")

        @evaluation_runs.setter
        def evaluation_runs(self, value: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            pass

    async def scenario() -> None:
        well, badly = await make(TEN), await make(TEN)
        badly.adapter.outcome = TrainingStatusEnum.FAILED
        for found in (well, badly):
            await found.trainer.run(1)
            await found.trainer.bind_components(Torn(TEN, []), found.adapter)
        await badly.trainer.cleanup()
        with pytest.raises(OSError, match="the disk is gone"):
            await well.trainer.cleanup()

    asyncio.run(scenario())


def test_files_go_on_where_an_earlier_process_stopped_and_forget_other_runs(tmp_path: Path) -> None:
    def epoch(run: str, number: int, reward: float) -> None:
        files = EpochFiles(tmp_path)
        files.resume(run, number)
        files.add_epoch(run, number, {"avg_reward": reward, "curriculum_percentile": 0.3}, {"current_percentile": 0.3})

    for number, reward in ((0, 0.1), (1, 0.2), (1, 0.3)):
        epoch("mine", number, reward)
    rows = [json.loads(line) for line in (tmp_path / "training_metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["avg_reward"]) for row in rows] == [(0, 0.1), (1, 0.3)]
    epoch("another", 0, float("nan"))
    (row,) = json.loads((tmp_path / "reward_history.json").read_text())
    assert row.pop("timestamp")
    assert row == {"epoch": 0, "avg_reward": None, "curriculum_percentile": 0.3}
    assert not list(tmp_path.glob(".*"))


def test_short_epochs_are_drawn_together_and_none_is_left_out_at_the_end(tmp_path: Path) -> None:
    plot = tmp_path / "reward_plot.png"
    files = EpochFiles(tmp_path)
    for epoch in range(3):
        files.add_epoch("r", epoch, {"avg_reward": epoch / 2}, {})
    assert not plot.exists()
    files.finish("r")
    drawn = plot.read_bytes()
    plot.unlink()
    files.finish("r")
    assert not plot.exists()
    again = EpochFiles(tmp_path)
    again.resume("r", 3)
    again.finish("r")
    assert plot.read_bytes() == drawn
    again.add_validation("r", 3, {"avg_reward": 0.9})
    again.finish("r")
    assert plot.read_bytes() != drawn


def test_a_trainer_that_derives_from_ours_may_end_a_run_by_a_rule_of_its_own(tmp_path: Path) -> None:
    class Enough(RollstreamTrainer):
        def reason_to_end(self, epoch: int) -> str | None:
            return "enough" if len(self.reward_history) == 2 else super().reason_to_end(epoch)

    async def scenario() -> None:
        calls: list[str] = []
        trainer = Enough(RollstreamTrainerConfig())
        await trainer.bind_components(Builder(TEN, calls), Adapter(calls))
        await trainer.initialize(FinetuneConfig(output_dir=tmp_path, run_configuration=FinetuneRunConfig()))
        statuses = await trainer.run(5)
        assert [status.status.value for status in statuses] == ["completed"] * 2
        assert [word for word in calls if word.startswith("start")] == ["start 0", "start 1"]
        assert [row["avg_reward"] for row in trainer.reward_history] == [pytest.approx(0.7)] * 2

    asyncio.run(scenario())


def test_builder_and_adapter_log_their_progress_with_the_run_id(caplog: pytest.LogCaptureFixture) -> None:
    builder = RollstreamTrajectoryBuilder(RollstreamTrajectoryBuilderConfig())
    adapter = RollstreamTrainerAdapter(RollstreamTrainerAdapterConfig(model=ModelSettings(path="m")))
    with caplog.at_level(logging.INFO):
        builder.log_progress("run-1", {"num_trajectories": 3})
        adapter.log_progress(TrainingJobRef(run_id="run-2", backend="rollstream"), {"progress": 50})
    assert [record.getMessage() for record in caplog.records] == [
        "rollouts of run run-1: {'num_trajectories': 3}",
        "training of run run-2: {'progress': 50}",
    ]
