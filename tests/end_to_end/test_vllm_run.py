"""A whole run whose rollouts real vLLM serves, from the command line to its replay: an adapter that learns."""

from typing import Any

import pytest

from tests.rigs import vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
RUN, EPOCHS, LAST = "served-1", 15, 3
PROJECTIONS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def configured(workplace: Any) -> str:
    engine = {
        "kind": "vllm",
        "executable": vllm_server.executable(),
        "arguments": ["--enforce-eager", "--max-num-seqs=64", "--no-enable-chunked-prefill"],
        "dtype": "float32",
        "max_loras": 2,
        "max_lora_rank": 8,
        "start_timeout_s": vllm_server.START_S,
    }
    written = workplace.configuration(num_epochs=EPOCHS, num_generations=8, max_turns=2, engine=engine)
    adapter = written["trainer_adapters"]["learner"]
    base = vllm_server.tiny_base(workplace.folder / "base")
    adapter["model"] = {"path": str(base), "lora": {"rank": 8, "alpha": 16, "target_modules": PROJECTIONS}}
    adapter["optimizer"] = {"learning_rate": "5e-3"}
    adapter["tasks_per_epoch"] = 8
    return str(workplace.write(written | {"workflow": "python:game.digits"}))


def test_a_run_on_vllm_earns_more_and_more_trains_on_what_was_sampled_and_replays(workplace: Any) -> None:
    command = ("finetune", "--config_file", configured(workplace), "--run_id", RUN)
    done = workplace.run(*command, timeout=700, **vllm_server.ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr + workplace.logs()

    rewards = [
        row["avg_reward"] for row in workplace.rows("SELECT epoch, avg_reward FROM epoch_summary ORDER BY epoch")
    ]
    assert len(rewards) == EPOCHS
    assert rewards[0] < 0.4
    assert sum(rewards[-LAST:]) / LAST > 0.8, rewards

    versions = workplace.rows("SELECT max(version) AS newest FROM weight_versions")
    assert versions[0]["newest"] >= EPOCHS - LAST  # not all: an epoch at whose end all earn the same trains nothing
    mismatch = workplace.rows(
        "SELECT count(*) AS n, max(mismatch_kl) AS kl, max(abs(log_ppl_diff)) AS difference FROM engine_mismatch"
    )[0]
    assert mismatch["n"] == versions[0]["newest"]
    assert 0 <= mismatch["kl"] <= 1e-3
    assert mismatch["difference"] <= 1e-3

    for how in ("--verify", "--train"):
        replayed = workplace.run("replay", RUN, how)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert f"equal: run {RUN}" in replayed.stdout
