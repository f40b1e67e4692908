"""Repairs of the configuration from `nat finetune` 1.9, and the packages that it needs and does not install."""

from pathlib import Path

import pytest
from nat.data_models import finetuning as nats
from nat.data_models.config import Config
from nat.data_models.llm import LLMBaseConfig

from rollstream.harness.nat.handover import as_nats, as_ours, check_packages, repair
from rollstream.schemas import finetuning as ours
from rollstream.schemas.errors import ConfigError


def handed_over(**run):
    """A configuration that holds itself, as NAT's finetuning_main leaves it."""
    file = Config()
    file.finetuning.run_configuration = nats.FinetuneRunConfig(config_file=file, **run)
    return file.finetuning


def test_a_configuration_that_holds_itself_can_be_shown_after_the_repair():
    finetune = handed_over(dataset=Path("a.json"), validation_dataset=Path("b.json"), validation_interval=2)
    with pytest.raises(RecursionError):
        repr(finetune)
    repair(finetune)
    assert "validation_interval=2" in repr(finetune)
    run = finetune.run_configuration
    assert run is not None
    assert (run.dataset, run.validation_dataset) == ("a.json", "b.json")
    assert isinstance(run.config_file, Config)
    assert run.config_file.finetuning.num_epochs == finetune.num_epochs
    assert "run_configuration=None" in repr(run.config_file)


def test_a_complete_configuration_is_not_repaired():
    finetune = handed_over(dataset="a.json")
    repair(finetune)
    before = finetune.run_configuration
    repair(finetune)
    assert finetune.run_configuration is before
    bare = ours.FinetuneConfig()
    repair(bare)
    assert bare.run_configuration is None


def test_missing_packages_are_named_with_the_command_that_installs_them():
    finetune = handed_over()
    check_packages(finetune)
    with pytest.raises(ConfigError, match=r"needs tqdm, langchain_core, .* pip install tqdm langchain-core$"):
        check_packages(finetune, lambda module: module not in ("tqdm", "langchain_core"))
    check_packages(finetune, lambda module: module != "nat.plugins.profiler")
    run = finetune.run_configuration
    assert run is not None
    assert isinstance(run.config_file, Config)
    run.config_file.llms = {"policy": LLMBaseConfig()}
    with pytest.raises(ConfigError, match=r"pip install 'nvidia-nat-profiler==1\.9\.\*'"):
        check_packages(finetune, lambda module: module != "nat.plugins.profiler")


@pytest.mark.parametrize(
    "value",
    [
        ours.TrajectoryCollection(
            run_id="r",
            trajectories=[
                [
                    ours.Trajectory(
                        episode=[
                            ours.EpisodeItem(role=ours.EpisodeItemRole.USER, content="?"),
                            ours.EpisodeItem(
                                role=ours.EpisodeItemRole.ASSISTANT, content="1", logprobs={"token_ids": [1]}
                            ),
                        ],
                        reward=0.5,
                        shaped_rewards=[0.5],
                        metadata={"id": 3},
                    )
                ],
                [
                    ours.Trajectory(
                        episode=[ours.DPOItem(prompt="?", chosen_response="1", rejected_response="2")], reward=1.0
                    )
                ],
            ],
        ),
        ours.TrainingJobRef(run_id="r", backend="rollstream", metadata={"job_id": "r/rl"}),
        ours.TrainingJobStatus(run_id="r", backend="rollstream", status=ours.TrainingStatusEnum.FAILED, message="no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_are_the_same_json_in_both_packages(value):
    theirs = as_nats(value)
    assert type(theirs).__module__ == "nat.data_models.finetuning"
    assert theirs.model_dump_json() == value.model_dump_json()
    assert as_ours(theirs) == value
    assert as_ours([value])[0] is value
