"""An adapter for another training backend: what it is given is on the log, and its own status decides."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollstream.harness.components.build import components_of
from rollstream.harness.components.conduct import conduct_components
from rollstream.harness.components.external_adapter import recording
from rollstream.harness.components.interfaces import TrainerAdapter, TrajectoryBuilder
from rollstream.harness.config import file as config_file
from rollstream.harness.config.components import RollstreamTrainerAdapterConfig
from rollstream.harness.config.jobs import RunLocation, services_of
from rollstream.harness.config.registry import register_trainer_adapter, register_trajectory_builder
from rollstream.harness.runs.outcome import end
from rollstream.harness.runs.preflight import check_paths
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    GroupClosed,
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    StepRecorded,
    SubmissionReceived,
    TrajectoryRejected,
)
from rollstream.schemas.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import ProducerSettings
from tests.rigs.runs.epochwise_rig import EpochwiseRig, assert_every_attempt_has_one_outcome


class TextsConfig(TrajectoryBuilderConfig, name="texts_test_builder"):
    pass


class Texts(TrajectoryBuilder):
    """Two conversations of one example and one of another, as text with log-probabilities."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        pass

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        sum_of = [conversation("1+3=", answer, float(answer == "4")) for answer in ("4", "5")]
        return TrajectoryCollection(trajectories=[sum_of, [conversation("2+2=", "4", 0.25)]], run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


def conversation(question: str, answer: str, reward: float) -> Trajectory:
    episode = [
        EpisodeItem(role=EpisodeItemRole.USER, content=question),
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content=answer, logprobs=[{"token": answer, "logprob": -0.5}]),
    ]
    return Trajectory(episode=episode, reward=reward, metadata={"id": question})


class BackendConfig(TrainerAdapterConfig, name="other_test_backend"):
    endpoint: str = "http://training-server:8080"
    fails_at: int | None = None
    failure: str = "no GPU is left"
    is_up: bool = True
    max_staleness: int = 0


class OtherBackend(TrainerAdapter):
    """Remembers what it was given; a job fails where it is told to."""

    given: ClassVar[list[TrajectoryCollection]] = []

    async def is_healthy(self) -> bool:
        return self.adapter_config.is_up  # pyright: ignore[reportAttributeAccessIssue]

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.given.append(trajectories)
        return TrainingJobRef(run_id=trajectories.run_id, backend="other", metadata={"job": len(self.given) - 1})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        assert ref.metadata is not None
        failed = ref.metadata["job"] == self.adapter_config.fails_at  # pyright: ignore[reportAttributeAccessIssue]
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend="other",
            status=TrainingStatusEnum.FAILED if failed else TrainingStatusEnum.COMPLETED,
            message=self.adapter_config.failure if failed else None,  # pyright: ignore[reportAttributeAccessIssue]
        )

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


class MixedConfig(RollstreamTrainerAdapterConfig, name="mixed_test_backend"):
    fails_at: int | None = None
    is_up: bool = True


@pytest.fixture(autouse=True)
def _registered_for_a_test(registered_alone: None) -> None:
    OtherBackend.given.clear()

    @register_trajectory_builder(config_type=TextsConfig)
    async def build_texts(config: TextsConfig, builder: Any) -> AsyncIterator[Texts]:
        yield Texts(config)

    @register_trainer_adapter(config_type=MixedConfig)
    @register_trainer_adapter(config_type=BackendConfig)
    async def build_backend(config: BackendConfig, builder: Any) -> AsyncIterator[OtherBackend]:
        yield OtherBackend(config)


def written(folder: Path, **adapter: Any) -> dict[str, Any]:
    return {
        "trajectory_builders": {"b": {"_type": "texts_test_builder"}},
        "trainer_adapters": {"a": {"_type": "other_test_backend", **adapter}},
        "trainers": {"t": {"_type": "rollstream"}},
        "workflow": {"_type": "their_agent"},
        "finetuning": {
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "num_epochs": 2,
            "output_dir": str(folder / "output"),
        },
    }


async def conducted(rig: EpochwiseRig, *, resume: bool = False) -> Any:
    """A whole run to its end; its outcome."""
    async with asyncio.timeout(120), rig.services(), await rig.open_run(resume=resume) as handle:
        async with components_of(rig.loaded.finetune, rig.folder) as components:
            progress = await conduct_components(handle, components, rig.loaded.finetune)
        return await end(rig.log, rig.artifacts, progress, handle.run, rig.loaded.config)


def test_another_backends_trajectories_are_on_the_log_and_no_learner_is_needed(tmp_path: Path) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path))
    assert rig.loaded.config.trainer.planning == "submitted"
    check_paths(rig.loaded.config)
    location = RunLocation(KafkaSettings(bootstrap_servers="none"), "artifacts", tmp_path)
    services = services_of(rig.loaded.config, location, "run-1")
    assert "learner-1" not in services
    producers = services["producers-1"]
    assert isinstance(producers, ProducerSettings)
    assert producers.engine.kind == "scripted"  # which needs neither torch nor a model

    async def scenario() -> None:
        outcome = await conducted(rig)
        assert (outcome.status, outcome.message, outcome.exit_code, outcome.output_dir) == ("completed", "", 0, None)
        assert "version" not in outcome.summary()
        closed = {group.group_id: group for group in await rig.events("groups", GroupClosed)}
        submissions = await rig.events("groups", SubmissionReceived)
        assert [one.epoch for one in submissions] == [0, 1]
        rewards = [sorted(closed[group.group_id].example_id for group in one.groups) for one in submissions]
        assert rewards == [["1+3=", "2+2="]] * 2
        seals = await rig.events("batches", EpochSealed)
        assert [(seal.num_trained_groups, seal.num_batches) for seal in seals] == [(2, 0), (2, 0)]
        outputs = [step.data["output"] for step in await rig.events("steps", StepRecorded) if step.data]
        assert Counter(outputs) == Counter({"4": 4, "5": 2})
        assert not await rig.events("batches", BatchPlanned)
        rejected = await rig.events("batches", TrajectoryRejected)
        assert Counter(one.cause for one in rejected) == Counter(handed_over=6)
        (job,) = await rig.events("jobs", JobSubmitted)
        assert job.settings.kind == "external"
        assert len(await rig.events("jobs", JobSucceeded)) == 1
        await assert_every_attempt_has_one_outcome(rig)

    asyncio.run(scenario())
    assert [len(one.trajectories) for one in OtherBackend.given] == [2, 2]


def test_its_failed_job_is_the_runs_failure(tmp_path: Path) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path, fails_at=0))

    async def scenario() -> None:
        outcome = await conducted(rig)
        assert (outcome.status, outcome.message, outcome.exit_code) == ("failed", "no GPU is left", 1)
        assert [one.error for one in await rig.events("jobs", JobFailed)] == ["no GPU is left"]
        assert [one.cause for one in await rig.events("groups", RunEnded)] == ["failed"]

    asyncio.run(scenario())
    assert len(OtherBackend.given) == 1


def test_the_log_has_a_failure_of_others_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_BACKEND_API_KEY", "s3cr3t-of-the-backend")
    rig = EpochwiseRig(tmp_path, written(tmp_path, fails_at=0, failure="s3cr3t-of-the-backend is refused"))

    async def scenario() -> None:
        outcome = await conducted(rig)
        message = [one.error for one in await rig.events("jobs", JobFailed)]
        message += [one.message for one in await rig.events("groups", RunEnded)]
        assert message == [outcome.message] * 2 == ["${OTHER_BACKEND_API_KEY} is refused"] * 2

    asyncio.run(scenario())


def test_a_run_that_goes_on_hands_no_sealed_epoch_over_again(tmp_path: Path) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path))

    async def scenario() -> None:
        built = components_of(rig.loaded.finetune, tmp_path)
        async with asyncio.timeout(120), rig.services(), await rig.open_run() as handle, built as components:
            trainer = components.trainer
            adapter = recording(components.trainer_adapter, handle, rig.loaded.finetune)
            await trainer.bind_components(components.trajectory_builder, adapter)
            await trainer.initialize(rig.loaded.finetune)
            first = await trainer.run_epoch(0, "run-1")
            assert first is not None
            assert await adapter.submit(OtherBackend.given[0]) == first  # the same again
        assert len(OtherBackend.given) == 1
        assert (await conducted(rig, resume=True)).status == "completed"

    asyncio.run(scenario())
    assert len(OtherBackend.given) == 2


def test_a_backend_that_is_down_is_reported_before_any_rollout(tmp_path: Path) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path, is_up=False))
    with pytest.raises(ConfigError, match=r"trainer_adapters\.a: its training backend is not healthy"):
        asyncio.run(conducted(rig))
    assert not OtherBackend.given


def test_an_environment_that_needs_a_model_here_is_refused_with_what_to_do(tmp_path: Path) -> None:
    content = written(tmp_path)
    content["trajectory_builders"]["b"] = {"_type": "rollstream", "environment": "guess_number"}
    with pytest.raises(ConfigError, match=r"'other_test_backend' trains with another backend.* guess_number .*--endp"):
        config_file.resolve(content)


def test_a_configuration_of_ours_with_an_adapter_that_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    content = written(tmp_path)
    content["trainer_adapters"]["a"] = {
        "_type": "mixed_test_backend",
        "model": {"path": str(tmp_path / "model")},
        "workspace": str(tmp_path),
    }
    with pytest.raises(
        ConfigError, match=r"trainer_adapters\.a: OtherBackend is not derived from RollstreamTrainerAdapter"
    ):
        asyncio.run(conducted(EpochwiseRig(tmp_path, content)))


async def killed_while_it_waits(rig: EpochwiseRig, monkeypatch: pytest.MonkeyPatch, job: int) -> None:
    """Conduct a run whose process is gone while `job` is in training."""
    status = OtherBackend.status

    async def wait(self: OtherBackend, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        if ref.metadata == {"job": job}:
            raise InterruptedError("killed while it waits")
        return await status(self, ref)

    with monkeypatch.context() as patched:
        patched.setattr(OtherBackend, "wait_until_complete", wait)
        with pytest.raises(InterruptedError):
            await conducted(rig)


@pytest.mark.parametrize("last", [0, 1])
def test_a_job_that_failed_after_its_process_was_killed_fails_the_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path, fails_at=last))

    async def scenario() -> None:
        await killed_while_it_waits(rig, monkeypatch, last)
        outcome = await conducted(rig, resume=True)
        assert (outcome.status, outcome.message, outcome.exit_code) == ("failed", "no GPU is left", 1)
        assert [one.error for one in await rig.events("jobs", JobFailed)] == ["no GPU is left"]
        assert not await rig.events("jobs", JobSucceeded)

    asyncio.run(scenario())
    assert len(OtherBackend.given) == last + 1


def test_a_resumed_run_whose_jobs_are_not_known_stays_open_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path))
    known = tmp_path / "training_jobs" / "run-1.json"

    async def scenario() -> None:
        await killed_while_it_waits(rig, monkeypatch, 1)
        known.unlink()
        with pytest.raises(ConfigError, match=r"run-1\.json: no reference to the training job of epoch 1, so"):
            await conducted(rig, resume=True)
        assert not await rig.events("groups", RunEnded)
        known.write_text('[{"epoch":1,"status":"completed"}]')
        assert (await conducted(rig, resume=True)).status == "completed"

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_staleness", "missing"), [(0, "2"), (1, "1, 2"), (5, "0, 1, 2")])
def test_only_jobs_that_can_have_been_in_training_must_be_known_to_resume_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int, missing: str
) -> None:
    content = written(tmp_path, max_staleness=max_staleness)
    content["finetuning"]["num_epochs"] = 3
    rig = EpochwiseRig(tmp_path, content)

    async def scenario() -> None:
        await killed_while_it_waits(rig, monkeypatch, 2)
        (tmp_path / "training_jobs" / "run-1.json").unlink()  # an earlier release wrote none
        with pytest.raises(ConfigError, match=rf"no reference to the training job of epoch {missing}, so"):
            await conducted(rig, resume=True)

    asyncio.run(scenario())


def test_a_backend_that_no_longer_knows_a_job_leaves_the_resumed_run_open_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path))
    kept = tmp_path / "training_jobs" / "run-1.json"

    async def unknown(self: OtherBackend, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        raise KeyError("job 1")

    async def scenario() -> None:
        await killed_while_it_waits(rig, monkeypatch, 1)
        monkeypatch.setattr(OtherBackend, "wait_until_complete", unknown)
        with pytest.raises(ConfigError) as raised:
            await conducted(rig, resume=True)
        message = str(raised.value)
        assert message.startswith(
            f"{kept}: the training backend did not say how the training job of epoch 1 ended: Key"
        )
        entry = '{"epoch":1,"status":"completed"}'
        assert message.endswith(f'write how it ended in the file beside the others, e.g. {entry} (or "failed")')
        assert not await rig.events("groups", RunEnded)
        kept.write_text(kept.read_text().rstrip().removesuffix("]") + f", {entry}]")
        assert (await conducted(rig, resume=True)).status == "completed"

    asyncio.run(scenario())


def test_a_reference_that_is_not_json_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = EpochwiseRig(tmp_path, written(tmp_path))
    submit = OtherBackend.submit

    async def with_an_object(self: OtherBackend, trajectories: TrajectoryCollection) -> TrainingJobRef:
        ref = await submit(self, trajectories)
        return ref.model_copy(update={"metadata": {**(ref.metadata or {}), "client": object()}})

    monkeypatch.setattr(OtherBackend, "submit", with_an_object)
    assert asyncio.run(conducted(rig)).status == "completed"
    assert '"ref": null' in (tmp_path / "training_jobs" / "run-1.json").read_text()
