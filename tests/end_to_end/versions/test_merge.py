"""A version of an adapter becomes a whole model by one command."""

from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_version_of_an_adapter_is_merged_and_continues_another_run(project: Any) -> None:
    configuration = project.configuration(num_epochs=1)
    learner = configuration["trainer_adapters"]["learner"]
    learner["model"]["lora"] = {"rank": 4, "alpha": 8}
    command = ("finetune", "--config_file", str(project.write(configuration)), "--run_id", "adapted")
    done = project.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    output = project.folder / "merged"
    merged = project.run("merge", "adapted@1", "--output", str(output))
    assert (merged.returncode, merged.stderr) == (0, "")
    assert merged.stdout == f"{output}: adapted/policy@1, lora weights\n"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in output.iterdir()}
    assert_mistakes_are_named(project, output)
    learner["model"] = {"path": str(output)}
    command = ("finetune", "--config_file", str(project.write(configuration)), "--run_id", "whole")
    done = project.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()


def assert_mistakes_are_named(project: Any, output: Any) -> None:
    for target, folder, message in (
        ("adapted@1", output, "something is there already; name a folder that is to be made"),
        ("adapted@7", "new", "adapted/policy@7: there is no such version, the model group has 0 to 1"),
        ("gone@1", "new", "run gone does not exist; `rollstream runs` lists all runs"),
        ("adapted", "new", "give a model group and a version as GROUP@VERSION"),
    ):
        refused = project.run("merge", target, "--output", str(folder))
        assert refused.returncode == 1
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1
