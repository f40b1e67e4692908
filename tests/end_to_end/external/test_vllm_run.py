"""A whole run whose rollouts real vLLM serves, from the command line to its replay: an adapter that learns."""

from typing import Any

import pytest

from tests.rigs.services import vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
RUN, EPOCHS, LAST = "served-1", 15, 3
PROJECTIONS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


DUO = '''
from zlib import crc32

from rollstream.producers.rollout.session import Session


async def duo(session: Session) -> None:
    """The second agent answers the first one; each is rewarded by its own words."""
    text = "?"
    for agent in session.agents:
        text = (await session.chat([{"role": "user", "content": text}], agent=agent)).text
        await session.reward(crc32(text.encode()) / 2**32, agent=agent)
'''


def engine_of(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "vllm",
        "executable": vllm_server.executable(),
        "arguments": ["--enforce-eager", "--max-num-seqs=64", "--no-enable-chunked-prefill"],
        "dtype": "float32",
        "max_loras": 2,
        "max_lora_rank": 8,
        "start_timeout_s": vllm_server.START_S,
        **changes,
    }


def configured(project: Any) -> str:
    written = project.configuration(num_epochs=EPOCHS, num_generations=8, max_turns=2, engine=engine_of())
    adapter = written["trainer_adapters"]["learner"]
    base = vllm_server.tiny_base(project.folder / "base")
    adapter["model"] = {"path": str(base), "lora": {"rank": 8, "alpha": 16, "target_modules": PROJECTIONS}}
    adapter["optimizer"] = {"learning_rate": "5e-3"}
    adapter["tasks_per_epoch"] = 8
    return str(project.write(written | {"workflow": "python:game.digits"}))


def test_a_run_on_vllm_earns_more_and_more_trains_on_what_was_sampled_and_replays(project: Any) -> None:
    command = ("finetune", "--config_file", configured(project), "--run_id", RUN)
    done = project.run(*command, timeout=700, **vllm_server.ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()

    rewards = [row["avg_reward"] for row in project.rows("SELECT epoch, avg_reward FROM epoch_summary ORDER BY epoch")]
    assert len(rewards) == EPOCHS
    assert rewards[0] < 0.4
    assert sum(rewards[-LAST:]) / LAST > 0.8, rewards

    versions = project.rows("SELECT max(version) AS newest FROM weight_versions")
    assert versions[0]["newest"] >= EPOCHS - LAST  # not all: an epoch at whose end all earn the same trains nothing
    mismatch = project.rows(
        "SELECT count(*) AS n, max(mismatch_kl) AS kl, max(abs(log_ppl_diff)) AS difference FROM engine_mismatch"
    )[0]
    assert mismatch["n"] == versions[0]["newest"]
    assert 0 <= mismatch["kl"] <= 1e-3
    assert mismatch["difference"] <= 1e-3

    for how in ("--verify", "--train"):
        replayed = project.run("replay", RUN, how)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert f"equal: run {RUN}" in replayed.stdout


def test_two_model_groups_are_adapters_on_one_server(project: Any) -> None:
    epochs, groups = 3, [f"{RUN}/one", f"{RUN}/two"]
    written = project.configuration(
        num_epochs=epochs,
        sampling={"max_new_tokens": 2},
        agents={"first": "one", "second": "two"},
        engine=engine_of(max_loras=4),
    )
    adapter = written["trainer_adapters"]["learner"]
    base = vllm_server.tiny_base(project.folder / "base")
    adapter["model"] = {"path": str(base), "lora": {"rank": 8, "alpha": 16, "target_modules": PROJECTIONS}}
    adapter["model_groups"] = {"two": {"optimizer": {"learning_rate": "5e-3"}}}
    (project.folder / "duo.py").write_text(DUO)
    path = str(project.write(written | {"workflow": "python:duo.duo"}))
    done = project.run("finetune", "--config_file", path, "--run_id", RUN, timeout=700, **vllm_server.ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    assert len(list(project.workspace.rglob("server-*.log"))) == 1, "one server has the adapters of both"
    versions = project.rows("SELECT model_group, max(version) AS newest FROM weight_versions GROUP BY 1 ORDER BY 1")
    assert [(row["model_group"], row["newest"]) for row in versions] == [(one, epochs) for one in groups]
    played = project.rows("SELECT agent, model_group, count(*) AS n FROM trajectories GROUP BY ALL ORDER BY 1")
    assert [(row["agent"], row["model_group"]) for row in played] == [("first", groups[0]), ("second", groups[1])]
    (apart,) = project.rows("SELECT max(mismatch_kl) AS kl, max(abs(log_ppl_diff)) AS difference FROM engine_mismatch")
    assert 0 <= apart["kl"] <= 1e-3
    assert apart["difference"] <= 1e-3
    replayed = project.run("replay", RUN, "--verify")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
