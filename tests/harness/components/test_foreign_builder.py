"""Another package's builder with rollstream's trainer and adapter: how its text and its token ids are trained on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from rollstream.harness.components.build import components_of
from rollstream.harness.components.conduct import conduct_components
from rollstream.harness.components.interfaces import TrajectoryBuilder
from rollstream.harness.config.registry import register_trajectory_builder
from rollstream.producers.rollout.recorded_call import FLAGS
from rollstream.schemas.events import BatchPlanned, RunEnded, StepRecorded, TrajectoryRejected
from rollstream.schemas.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from tests.rigs.runs.epochwise_rig import EpochwiseRig

REWARDS = (0.0, 1.0)


class ForeignConfig(TrajectoryBuilderConfig, name="foreign_test_builder"):
    is_exact: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)


class Foreign(TrajectoryBuilder):
    """Two conversations an epoch, as text with log-probabilities, or token for token."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        pass

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        text = [{"token": "4", "logprob": -0.5}, {"token": "", "logprob": -0.1}]
        exact = {"prompt_token_ids": [5, 6], "token_ids": [7, 1], "logprobs": [-0.5, -0.1]}
        assert isinstance(self.trajectory_builder_config, ForeignConfig)
        logprobs = exact if self.trajectory_builder_config.is_exact else text
        metadata = {"id": "sum", **self.trajectory_builder_config.metadata}
        group = [
            Trajectory(
                episode=[
                    EpisodeItem(role=EpisodeItemRole.USER, content="1+3="),
                    EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="4", logprobs=logprobs),
                ],
                reward=reward,
                metadata=metadata,
            )
            for reward in REWARDS
        ]
        return TrajectoryCollection(trajectories=[group], run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


@pytest.fixture(autouse=True)
def _registered_for_a_test(registered_alone: None) -> None:
    @register_trajectory_builder(config_type=ForeignConfig)
    async def build(config: ForeignConfig, builder: Any) -> AsyncIterator[Foreign]:
        yield Foreign(config)


def trained_and_rejected(
    folder: Path, *, is_exact: bool, metadata: dict[str, Any] | None = None, **adapter: Any
) -> tuple[EpochwiseRig, int, Counter[str]]:
    """The run's rig, how many trajectories were trained in its two epochs, and how many were rejected by cause."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    written = {
        "trajectory_builders": {
            "b": {"_type": "foreign_test_builder", "is_exact": is_exact, "metadata": metadata or {}}
        },
        "trainer_adapters": {
            "a": {"_type": "rollstream", "model": {"path": str(folder / "model")}, "workspace": str(folder), **adapter}
        },
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
    rig = EpochwiseRig(folder, written)

    async def run() -> tuple[list[Any], list[Any]]:
        async with asyncio.timeout(60), rig.services(), await rig.open_run() as handle:
            async with components_of(rig.loaded.finetune, folder) as components:
                await conduct_components(handle, components, rig.loaded.finetune)
            await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="completed"))
        return await rig.events("batches", BatchPlanned), await rig.events("batches", TrajectoryRejected)

    planned, rejected = asyncio.run(run())
    return rig, sum(len(batch.members) for batch in planned), Counter(event.cause for event in rejected)


def test_equal_trajectories_with_token_ids_are_trained_on_in_every_epoch(tmp_path: Path) -> None:
    _, num_trained, rejected = trained_and_rejected(tmp_path, is_exact=True)
    assert (num_trained, rejected) == (4, Counter())


def test_an_epoch_in_the_metadata_of_another_builder_is_not_the_runs(tmp_path: Path) -> None:
    _, num_trained, rejected = trained_and_rejected(tmp_path, is_exact=True, metadata={"epoch": 0})
    assert (num_trained, rejected) == (4, Counter())


def test_text_alone_is_rejected_for_want_of_token_ids(tmp_path: Path) -> None:
    _, num_trained, rejected = trained_and_rejected(tmp_path, is_exact=False)
    assert (num_trained, rejected) == (0, Counter(no_token_ids=4))


def test_retokenised_text_is_trained_on_and_flagged(tmp_path: Path) -> None:
    rig, num_trained, rejected = trained_and_rejected(tmp_path, is_exact=False, retokenise=True)
    assert (num_trained, rejected) == (4, Counter())
    steps = asyncio.run(rig.events("steps", StepRecorded))
    metadata: list[Any] = [step.metadata for step in steps]
    assert all(one[FLAGS]["is_retokenised"] for one in metadata)
    assert len(steps) == 4
