"""A model by its name on the hub: from the hub's cache, without a network, trained and merged like one in a folder."""

from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.rigs.services.hub_cache import move_to_cache

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "tiny-org/tiny-agent"


@pytest.mark.parametrize("lora", [{"rank": 4, "alpha": 8}, None], ids=["adapter", "full weights"])
def test_a_model_of_the_hubs_cache_is_trained_and_merged_offline(project: Any, lora: dict[str, int] | None) -> None:
    home = project.folder / "hub_home"
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    snapshot = move_to_cache(project.model, NAME, home / "hub")
    configuration = project.configuration(num_epochs=1)
    configuration["trainer_adapters"]["learner"]["model"] = {"path": NAME, "lora": lora}
    command = ("finetune", "--config_file", str(project.write(configuration)), "--run_id", "hub")
    done = project.run(*command, **offline)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    (step,) = project.rows("SELECT version FROM training_steps WHERE num_optimizer_steps > 0")
    assert step["version"] == 1
    output = project.folder / "merged"
    merged = project.run("merge", "hub@1", "--output", str(output), **offline)
    assert (merged.returncode, merged.stderr) == (0, "")
    weights = "full" if lora is None else "lora"
    assert merged.stdout == f"{output}: hub/policy@1, {weights} weights\n"
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in output.iterdir()
    }
    if lora is not None:
        changed = {name: value * 2 for name, value in load_file(snapshot / "model.safetensors").items()}
        (snapshot / "model.safetensors").unlink()
        save_file(changed, snapshot / "model.safetensors", {"format": "pt"})
        merged = project.run("merge", "hub@1", "--output", str(project.folder / "again"), **offline)
        assert merged.returncode == 1
        assert f"an adapter of other weights than those of model {NAME}; restore its weight files" in merged.stderr
    configuration["trainer_adapters"]["learner"]["model"] = {"path": "tiny-org/absent"}
    command = ("finetune", "--config_file", str(project.write(configuration)), "--run_id", "absent")
    refused = project.run(*command, **offline)
    assert refused.returncode == 1
    assert (
        f"tiny-org/absent is neither a folder of {project.folder} nor in the hub's cache {home}/hub" in refused.stderr
    )
    assert "run `hf download tiny-org/absent`" in refused.stderr
    assert refused.stderr.count("\n") == 1
