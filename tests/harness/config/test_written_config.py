"""The stored form of a run that was started without a file of rollstream's reads as the same configuration."""

from pathlib import Path

from rollstream.harness.config.components import written_of
from rollstream.harness.config.file import resolve
from tests.rigs.runs.epochwise_rig import configuration


def test_a_configuration_written_out_is_read_as_it_was(tmp_path: Path) -> None:
    written = configuration(tmp_path, curriculum_learning={"enabled": True, "random_subsample": 0.5})
    written["trajectory_builders"]["b"] |= {"environment_config": {"low": 1}, "sampling": {"temperature": 0.5}}
    written["trainers"]["t"]["early_stopping"] = {"patience": 2}
    config = resolve(written).config
    again = resolve(written_of(config)).config
    assert again.builder.environment == config.environment
    assert again.model_copy(update={"builder": config.builder}) == config
    assert again.builder == config.builder.model_copy(update={"environment": config.environment})
