"""Small runs from the command line to their end, and what can be asked of them afterwards."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_runs_train_share_a_workspace_and_can_be_asked(workplace: Any) -> None:
    config = workplace.write(workplace.configuration(num_epochs=3))
    done = workplace.run("finetune", "--config_file", str(config), "--result_json_path", str(workplace.result))
    assert done.returncode == 0, done.stdout + done.stderr + workplace.logs()
    result = json.loads(workplace.result.read_text())
    assert result["status"] == "completed"
    assert (workplace.folder / "output" / "config.json").exists()
    assert (workplace.folder / "output" / "model.safetensors").exists()
    assert_a_run_can_be_asked(workplace, result["run_id"])
    configuration = workplace.configuration(num_epochs=2, sampling={"max_new_tokens": 3, "top_p": 0.8})
    configuration["trainer_adapters"]["learner"]["warm_start"] = {"num_epochs": 2, "tasks_per_epoch": 2}
    configuration["trainer_adapters"]["learner"] |= {"keep_last": 1, "keep_every": 100}
    second = workplace.run("finetune", "--config_file", str(workplace.write(configuration)), "--name", "second")
    assert second.returncode == 0, second.stdout + second.stderr + workplace.logs()
    assert_a_warm_start_was_followed_by_reinforcement(workplace)
    assert_jobs_are_listed_and_unneeded_weights_are_removed(workplace)
    assert_both_are_replayed_equal(workplace)
    listed = workplace.run("runs").stdout
    assert result["run_id"] in listed
    assert "second-" in listed


def assert_a_run_can_be_asked(workplace: Any, run_id: str) -> None:
    epochs = workplace.rows("SELECT epoch, avg_reward, trained_groups FROM epoch_summary ORDER BY epoch")
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    started = workplace.rows("SELECT count(DISTINCT rollout_id) AS n FROM rollouts")[0]["n"]
    outcomes = workplace.rows("SELECT outcome, count(*) AS n, count(DISTINCT rollout_id) AS d FROM outcomes GROUP BY 1")
    assert started == sum(row["n"] for row in outcomes) == sum(row["d"] for row in outcomes) == 3 * 4 * 4
    assert {row["outcome"] for row in outcomes} <= {"trained", "rejected"}
    picture = workplace.folder / "plot.png"
    plotted = workplace.run("plot", run_id, "-o", str(picture))
    assert plotted.returncode == 0, plotted.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def assert_a_warm_start_was_followed_by_reinforcement(workplace: Any) -> None:
    jobs = workplace.rows("SELECT job_id, state FROM jobs WHERE run_id LIKE 'second-%' ORDER BY job_id")
    assert [(row["job_id"].rsplit("/", 1)[1], row["state"]) for row in jobs] == [
        ("rl", "succeeded"),
        ("sft", "succeeded"),
    ]
    versions = workplace.rows("SELECT max(version) AS v FROM weight_versions WHERE run_id LIKE 'second-%'")
    assert versions[0]["v"] >= 2


def assert_jobs_are_listed_and_unneeded_weights_are_removed(workplace: Any) -> None:
    listed = [line.split() for line in workplace.run("jobs").stdout.splitlines()]
    second = listed[-1][0]
    assert [row[1:6] for row in listed if row[0] == second] == [
        ["sft", "sft", "succeeded", f"{second}/policy", "sft"],
        ["rl", "rl", "succeeded", f"{second}/policy", "grpo"],
    ]
    unknown = workplace.run("jobs", "gone")
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "error: run gone does not exist; `rollstream runs` lists all runs\n",
    )
    versions = workplace.rows("SELECT run_id, version, weights_sha256 FROM weight_versions ORDER BY version")
    hashes = {row["version"]: row["weights_sha256"] for row in versions if row["run_id"] == second}
    needed = {row["weights_sha256"] for row in versions if row["run_id"] != second}
    needed |= {hashes[0], hashes[2], hashes[max(hashes)]}
    assert hashes[1] not in needed, "the warm start changed what its first version begins with"
    collected = {
        row["weights_sha256"]: row["collected_by"]
        for row in workplace.rows("SELECT weights_sha256, collected_by FROM weight_versions WHERE is_collected")
    }
    assert collected[hashes[1]] == "learner-1"  # while the run went on
    going = set(hashes.values()) - needed - collected.keys()
    done = workplace.run("gc")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"removed {len(going)} weight files (")
    assert {file.stem for file in (workplace.workspace / "artifacts").glob("*/*.safetensors")} == needed
    (counted,) = workplace.rows("SELECT count(*) AS n FROM weight_versions WHERE is_collected")
    assert counted["n"] == len(collected) + len(going)


def assert_both_are_replayed_equal(workplace: Any) -> None:
    first, second = (row["run_id"] for row in workplace.rows("SELECT run_id FROM runs ORDER BY run_id DESC"))
    for run, options in ((first, ["--verify", "--train", "--epoch", "1"]), (second, ["--verify", "--train"])):
        replayed = workplace.run("replay", run, *options, "--workers", "2")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert replayed.stdout.startswith(f"equal: run {run}: ")
    checkpoint = sorted((workplace.workspace / "checkpoints" / f"{first}%2Fpolicy").glob("*.safetensors"))[-1]
    data = checkpoint.read_bytes()
    checkpoint.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    replayed = workplace.run("replay", first, "--verify")
    assert replayed.returncode == 1
    assert checkpoint.name in replayed.stderr
