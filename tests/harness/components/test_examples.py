"""The examples: every file can be read, and the components of one's own do what they say, on a log in memory."""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components.build import components_of
from rollstream.harness.components.conduct import conduct_components
from rollstream.harness.config.file import load
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import EpochSealed, GroupClosed, RewardRecorded, RunEnded, SubmissionReceived
from tests.rigs.runs.epochwise_rig import EpochwiseRig

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
CUSTOM = ROOT / "examples" / "custom" / "run.yaml"
OWN = {
    "price_per_token": 0.05,
    "max_tokens": 5,
    "lowest_reward": 0.1,
    "highest_reward": 0.6,
    "enough": 0.01,
    "num_epochs_in_a_row": 2,
}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the examples at the root: paths are relative to it, and modules are found there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    importlib.import_module("examples.custom.world")  # as `modules` of the file has producers do


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_every_example_can_be_read(path: Path) -> None:
    loaded = load(path)
    assert loaded.config.finetuning.enabled
    if loaded.config.dataset is not None:
        assert loaded.config.dataset.file_path.is_file()


def digits(prompt: str, rng: Any, version: int) -> tuple[str, float]:
    """One to five digits, so that some answers are too long for the builder of the example."""
    return "".join(str(rng.randrange(10)) for _ in range(rng.randint(1, 5))), -1.0


def configuration(folder: Path) -> dict[str, Any]:
    """The example's, in a folder of the test's own and without the demonstrations that only a model learns from."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    written: dict[str, Any] = load(CUSTOM).written
    builder, adapter = written["trajectory_builders"]["rollouts"], written["trainer_adapters"]["learner"]
    builder |= {"workspace": str(folder), "price_per_token": OWN["price_per_token"], "max_tokens": OWN["max_tokens"]}
    adapter |= {
        "workspace": str(folder),
        "model": {"path": str(folder / "model")},
        "lowest_reward": OWN["lowest_reward"],
        "highest_reward": OWN["highest_reward"],
    }
    del adapter["warm_start"]
    trainer = written["trainers"]["trainer"]
    trainer |= {"enough": OWN["enough"], "num_epochs_in_a_row": OWN["num_epochs_in_a_row"]}
    written["finetuning"] |= {"num_epochs": 5, "output_dir": str(folder / "output")}
    return written


async def conducted(rig: EpochwiseRig, *, resume: bool = False) -> Any:
    """The run, conducted by the components that the file names; ended as the command ends it."""
    async with asyncio.timeout(60), rig.services(), await rig.open_run(resume=resume) as handle:
        async with components_of(rig.loaded.finetune, rig.folder) as components:
            progress = await conduct_components(handle, components, rig.loaded.finetune)
        await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="completed"))
        return progress


def test_the_examples_of_custom_components_work_as_documented(tmp_path: Path) -> None:
    rig = EpochwiseRig(tmp_path, configuration(tmp_path), script=digits)
    assert rig.loaded.config.trainer.planning == "submitted"
    asyncio.run(conducted(rig))
    sealed = asyncio.run(rig.events("batches", EpochSealed))
    assert [(seal.epoch, seal.num_batches) for seal in sealed] == [(0, 1), (1, 1), (2, 0)], "ended by the trainer"
    submissions = asyncio.run(rig.events("groups", SubmissionReceived))[:2]
    members = {
        member.trajectory_id: member
        for group in asyncio.run(rig.events("groups", GroupClosed))
        for member in group.members
    }
    names = {event.name for event in asyncio.run(rig.events("steps", RewardRecorded))}
    assert names == {"reward", "digit_share"}
    trained = {
        name: reward
        for submission in submissions
        for group in submission.groups
        for name, reward in zip(group.trajectory_ids, group.rewards, strict=True)
    }
    assert 0 < len(trained) < len(members), "the builder leaves out what is too long"
    for name, reward in trained.items():
        assert members[name].num_completion_tokens <= OWN["max_tokens"]
        priced = members[name].reward - OWN["price_per_token"] * members[name].num_completion_tokens
        assert reward == pytest.approx(min(max(priced, OWN["lowest_reward"]), OWN["highest_reward"]))
    lines = (tmp_path / "output" / "submissions.jsonl").read_text().splitlines()
    noted = [json.loads(line) for line in lines]
    assert [one["submission_id"] for one in noted] == [one.submission_id for one in submissions]
    assert {name: reward for one in noted for name, reward in one["rewards"].items()} == trained


def test_a_value_that_an_own_configuration_refuses_is_named_by_its_path() -> None:
    reported = r"trainer_adapters\.learner.*lowest_reward 2 is not below highest_reward 1"
    with pytest.raises(ConfigError, match=reported):
        load(CUSTOM, [("trainer_adapters.learner.lowest_reward", "2")])
    with pytest.raises(ConfigError, match=r"trajectory_builders\.rollouts\.price_per_tokn.*price_per_token"):
        load(CUSTOM, [("trajectory_builders.rollouts.price_per_tokn", "2")])
