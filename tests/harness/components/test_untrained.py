"""End of a run that trained nothing: its message, whether it failed, and that it leaves no model."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components import epochs, run_completion
from rollstream.harness.components.build import components_of
from rollstream.harness.components.conduct import conduct_components
from rollstream.harness.components.interfaces import TrajectoryBuilder
from rollstream.harness.config.registry import register_trajectory_builder
from rollstream.harness.runs import outcome as ending
from rollstream.harness.runs.outcome import Outcome
from rollstream.harness.runs.plan import look_up
from rollstream.harness.upkeep.run_control import find_job
from rollstream.harness.upkeep.run_tables import jobs_table
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas.events import BatchPlanned, JobSucceeded, RunEnded, RunStarted
from rollstream.schemas.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from rollstream.schemas.variables import MAX_JOB_ERROR
from tests.rigs.runs.epochwise_rig import EpochwiseRig, configuration

EXACT = {"prompt_token_ids": [5, 6], "token_ids": [7, 1], "logprobs": [-0.5, -0.1]}
LONG = " \ud83d " + "x" * 2_000_000
"""Half of a surrogate pair, and more than a record may have."""


class TextConfig(TrajectoryBuilderConfig, name="untrained_test_builder"):
    is_exact: bool = False
    rewards: tuple[float, ...] = (0.0, 1.0)


class TextBuilder(TrajectoryBuilder):
    """One group an epoch: the text of another server's model, or token for token."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        pass

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        config = self.trajectory_builder_config
        assert isinstance(config, TextConfig)
        logprobs = EXACT if config.is_exact else [{"token": "4", "logprob": -0.5}]
        answer = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="4", logprobs=logprobs)
        episode = [EpisodeItem(role=EpisodeItemRole.USER, content="1+3="), answer]
        group = [Trajectory(episode=episode, reward=reward, metadata={"id": "sum"}) for reward in config.rewards]
        return TrajectoryCollection(trajectories=[group] if group else [], run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


@pytest.fixture(autouse=True)
def _registered_for_a_test(registered_alone: None) -> None:
    @register_trajectory_builder(config_type=TextConfig)
    async def build(config: TextConfig, builder: Any) -> AsyncIterator[TextBuilder]:
        yield TextBuilder(config)


def with_text(folder: Path, builder: dict[str, Any] | None = None, **finetuning: Any) -> dict[str, Any]:
    written = configuration(folder, num_epochs=2, **finetuning)
    written["trajectory_builders"]["b"] = {"_type": "untrained_test_builder", **(builder or {})}
    written["workflow"] = {"_type": "their_agent"}
    return written


def ended(rig: EpochwiseRig) -> tuple[Outcome, list[RunEnded]]:
    """A whole run as `rollstream finetune` conducts and ends it, and how it ended on the log; all views agree on it."""

    async def run() -> tuple[Outcome, list[RunEnded]]:
        async with asyncio.timeout(120), rig.services(), await rig.open_run() as handle:
            async with components_of(rig.loaded.finetune, rig.folder) as components:
                progress = await conduct_components(handle, components, rig.loaded.finetune)
            outcome = await ending.end(rig.log, rig.artifacts, progress, handle.run, rig.loaded.config)
        await assert_views_agree(rig, outcome)
        return outcome, await rig.events("groups", RunEnded)

    return asyncio.run(run())


async def assert_views_agree(rig: EpochwiseRig, outcome: Outcome) -> None:
    """The run has ended as the terminal says, and its job has too: by SQL, `rollstream jobs` and `jobs show`."""
    file = rig.folder / "metrics.duckdb"
    await project_to_end(rig.log, file)
    with connect(file, read_only=True) as connection:
        runs = connection.execute("SELECT state, message FROM runs").fetchall()
        jobs = connection.execute("SELECT state, error FROM jobs").fetchall()
    assert runs == [(outcome.status, "" if outcome.status == "stopped" else outcome.message)]
    shown = await find_job(rig.log, "run-1/rl")
    state = {"completed": "succeeded", "failed": "failed", "stopped": "cancelled"}[outcome.status]
    listed = jobs_table([await look_up(rig.log, "run-1")]).splitlines()[1].split()
    assert {jobs[0][0], shown.status, listed[3]} == {state}
    if outcome.exit_code:
        assert jobs[0][1] == shown.error
        assert f"job run-1/rl failed: {shown.error}" in outcome.message


def assert_failed(rig: EpochwiseRig, *words: str) -> Outcome:
    outcome, (event,) = ended(rig)
    assert (outcome.status, outcome.exit_code, outcome.output_dir) == ("failed", 1, None)
    assert (event.cause, event.message) == ("failed", outcome.message)
    for word in ("nothing was trained", *words):
        assert word in outcome.message
    assert not (rig.folder / "output" / "model.safetensors").exists()
    return outcome


def test_a_run_whose_answers_have_no_token_ids_is_failed_with_the_causes_and_leaves_no_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = assert_failed(EpochwiseRig(tmp_path, with_text(tmp_path)), "4 trajectories rejected: no_token_ids")
    assert "base_url" in outcome.message, "the remedy"
    assert "epoch 0: none of the submitted trajectories are trained on (rejected: 2 no_token_ids)" in caplog.text


def test_a_run_whose_builder_makes_nothing_is_failed(tmp_path: Path) -> None:
    written = with_text(tmp_path, {"rewards": []})
    assert_failed(EpochwiseRig(tmp_path, written), "the rollouts of 2 epochs produced no trajectories")


def test_a_run_whose_rollouts_all_fail_is_failed_with_their_causes(tmp_path: Path) -> None:
    written = configuration(tmp_path, num_epochs=2, num_examples=2)
    (tmp_path / "train.jsonl").write_text('{"id": "broken", "secret": "no number"}\n')
    rig = EpochwiseRig(tmp_path, written)
    outcome = assert_failed(
        rig,
        "none of its 2 groups had enough complete rollouts",
        "rollouts failed:",
        "WHERE o.run_id = 'run-1'",
    )
    config = rig.loaded.config
    (failures,) = remarks = asyncio.run(ending.remarks_of(rig.folder, "run-1", config))
    assert re.fullmatch(r"(\d+) of \1 rollouts failed, most often by environment_error: .+", failures)
    assert f"\n{failures}" in outcome._replace(remarks=remarks).summary()
    assert asyncio.run(ending.remarks_of(rig.folder, "run-2", config)) == ()
    assert asyncio.run(ending.remarks_of(rig.folder / "nowhere", "run-1", config)) == ()


def test_weights_that_no_recorded_reward_has_are_in_the_summary(tmp_path: Path) -> None:
    rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=1, num_examples=2, curriculum_learning=CUT))
    ended(rig)
    weights = {"reward_weights": {"rewrad": 0.5, "*": 1.0, "reward": 1.0}}
    config = rig.loaded.config.model_copy(update={"builder": rig.loaded.config.builder.model_copy(update=weights)})
    assert asyncio.run(ending.remarks_of(rig.folder, "run-1", config)) == (
        "reward_weights: no rollout has a reward rewrad; recorded were reward",
    )


CUT = {"enabled": True, "min_reward_diff": 2.0}


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_run_left_untrained_by_the_curriculum_alone_completes_without_a_model(tmp_path: Path, is_ours: bool) -> None:
    exact = with_text(tmp_path, {"is_exact": True}, curriculum_learning=CUT)
    ours = configuration(tmp_path, num_epochs=2, num_examples=2, curriculum_learning=CUT)
    outcome, (event,) = ended(EpochwiseRig(tmp_path, ours if is_ours else exact))
    assert (outcome.status, outcome.exit_code, outcome.output_dir) == ("completed", 0, None)
    assert event.cause == "completed"
    (*_, last) = outcome.summary().splitlines()
    assert last == outcome.message
    assert "nothing was trained" in last
    assert ("12 trajectories rejected: curriculum" if is_ours else "filtered out all groups of 2 epochs") in last


def test_a_job_that_succeeded_untrained_in_an_earlier_release_fails_its_run(tmp_path: Path) -> None:
    async def scenario() -> Outcome:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with asyncio.timeout(120), rig.services(), await rig.open_run() as handle:
            await handle.begin()
            group = handle.spec.model_group
            await rig.log.send(
                JobSucceeded(run_id="run-1", time_ms=1, final_version=0, job_id="run-1/rl", model_group=group)
            )
            await epochs.submit(handle, 0, (), is_last=True)
            await epochs.sealed(handle, 0)
            progress = await look_up(rig.log, "run-1")
            return await ending.end(rig.log, rig.artifacts, progress, handle.run, rig.loaded.config)

    outcome = asyncio.run(scenario())
    assert outcome.status == "failed"
    assert outcome.message == "job run-1/rl: nothing was trained (no trajectories were submitted for 1 epoch)"


def test_a_run_stopped_before_it_trained_reports_that_and_leaves_no_model(tmp_path: Path) -> None:
    rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_examples=2))

    async def stop(planned: BatchPlanned) -> None:
        await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
        await asyncio.Event().wait()

    rig.trains_slowly = stop
    outcome, _ = ended(rig)
    assert (outcome.status, outcome.exit_code, outcome.output_dir) == ("stopped", 0, None)
    assert outcome.summary().splitlines()[-1] == "nothing was trained"


def test_a_trainer_that_does_not_return_is_cancelled_once_its_run_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        was_cancelled = asyncio.Event()

        async def endless() -> list[Any]:
            try:
                return await asyncio.Event().wait() and []
            finally:
                was_cancelled.set()

        async with asyncio.timeout(120), rig.services(), await rig.open_run() as handle:
            waiting = asyncio.create_task(run_completion.returned(handle, endless(), grace_s=0.01))
            await handle.begin()
            await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
            with pytest.raises(run_completion.RunFailedError, match="run run-1 stopped"):
                await waiting
            assert was_cancelled.is_set()

    asyncio.run(scenario())


def test_a_run_that_fails_before_its_first_epoch_is_on_the_log_as_failed(tmp_path: Path) -> None:
    async def scenario() -> list[RunEnded]:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with asyncio.timeout(120), rig.services(), await rig.open_run() as handle:
            await run_completion.finalize_run(handle, is_completed=False, message="no dataset" + LONG)
        assert [event.run_id for event in await rig.events("groups", RunStarted)] == ["run-1"]
        return await rig.events("groups", RunEnded)

    (event,) = asyncio.run(scenario())
    assert event.cause == "failed"
    assert event.message.startswith("no dataset \\ud83d x")
    assert len(event.message) == MAX_JOB_ERROR
