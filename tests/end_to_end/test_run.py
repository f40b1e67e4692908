"""Small runs from the command line to their end, and what can be asked of them afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_runs_train_share_a_workspace_and_can_be_asked(project: Any) -> None:
    tracked = project.configuration(num_epochs=3)
    boards = project.folder / "boards"
    trackers = [{"kind": "tensorboard", "log_dir": str(boards), "poll_interval_s": 0.5}, {"kind": "python:json.dumps"}]
    tracked["trainers"]["trainer"]["trackers"] = trackers
    config = project.write(tracked)
    done = project.run("finetune", "--config_file", str(config), "--result_json_path", str(project.result))
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    result = json.loads(project.result.read_text())
    assert result["status"] == "completed"
    assert (project.folder / "output" / "config.json").exists()
    assert (project.folder / "output" / "model.safetensors").exists()
    assert "tracker python:json.dumps: run" in (project.workspace / "logs" / "tracker-2.log").read_text()
    assert_every_point_is_in_the_event_file_once(project, result["run_id"], boards)
    assert_a_run_can_be_asked(project, result["run_id"])
    configuration = project.configuration(num_epochs=2, sampling={"max_new_tokens": 3, "top_p": 0.8})
    configuration["trainer_adapters"]["learner"]["warm_start"] = {"num_epochs": 2, "tasks_per_epoch": 2}
    configuration["trainer_adapters"]["learner"] |= {"keep_last": 1, "keep_every": 100}
    second = project.run("finetune", "--config_file", str(project.write(configuration)), "--name", "second")
    assert second.returncode == 0, second.stdout + second.stderr + project.logs()
    assert_a_warm_start_was_followed_by_reinforcement(project)
    assert_jobs_are_listed_and_unneeded_weights_are_removed(project)
    assert_both_are_replayed_equal(project)
    listed = project.run("runs").stdout
    assert result["run_id"] in listed
    assert "second-" in listed


def assert_every_point_is_in_the_event_file_once(project: Any, run_id: str, boards: Path) -> None:
    events = EventAccumulator(str(boards / run_id / "rl"))
    events.Reload()
    steps = project.rows("SELECT version, loss FROM training_steps ORDER BY version")
    shown = [(one.step, one.value) for one in events.Scalars("training/loss/total")]
    assert shown == [(row["version"], pytest.approx(row["loss"], abs=1e-6)) for row in steps]
    assert [one.step for one in events.Scalars("epoch/avg_reward")] == [0, 1, 2]
    again = project.run("track", run_id, "--to", "tensorboard", "-o", "log_dir", str(boards))
    assert again.stdout == f"0 points of {run_id} sent to tensorboard\n", again.stderr


def assert_a_run_can_be_asked(project: Any, run_id: str) -> None:
    epochs = project.rows("SELECT epoch, avg_reward, trained_groups FROM epoch_summary ORDER BY epoch")
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    started = project.rows("SELECT count(DISTINCT rollout_id) AS n FROM rollouts")[0]["n"]
    outcomes = project.rows("SELECT outcome, count(*) AS n, count(DISTINCT rollout_id) AS d FROM outcomes GROUP BY 1")
    assert started == sum(row["n"] for row in outcomes) == sum(row["d"] for row in outcomes) == 3 * 4 * 4
    assert {row["outcome"] for row in outcomes} <= {"trained", "rejected"}
    picture = project.folder / "plot.png"
    plotted = project.run("plot", run_id, "-o", str(picture))
    assert plotted.returncode == 0, plotted.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def assert_a_warm_start_was_followed_by_reinforcement(project: Any) -> None:
    jobs = project.rows("SELECT job_id, state FROM jobs WHERE run_id LIKE 'second-%' ORDER BY job_id")
    assert [(row["job_id"].rsplit("/", 1)[1], row["state"]) for row in jobs] == [
        ("rl", "succeeded"),
        ("sft", "succeeded"),
    ]
    versions = project.rows("SELECT max(version) AS v FROM weight_versions WHERE run_id LIKE 'second-%'")
    assert versions[0]["v"] >= 2


def assert_jobs_are_listed_and_unneeded_weights_are_removed(project: Any) -> None:
    listed = [line.split() for line in project.run("jobs").stdout.splitlines()]
    second = listed[-1][0]
    assert [row[1:6] for row in listed if row[0] == second] == [
        ["sft", "sft", "succeeded", f"{second}/policy", "sft"],
        ["rl", "rl", "succeeded", f"{second}/policy", "grpo"],
    ]
    unknown = project.run("jobs", "gone")
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "error: run gone does not exist; `rollstream runs` lists all runs\n",
    )
    versions = project.rows("SELECT run_id, version, weights_sha256 FROM weight_versions ORDER BY version")
    hashes = {row["version"]: row["weights_sha256"] for row in versions if row["run_id"] == second}
    needed = {row["weights_sha256"] for row in versions if row["run_id"] != second}
    needed |= {hashes[0], hashes[2], hashes[max(hashes)]}
    assert hashes[1] not in needed, "the warm start changed what its first version begins with"
    collected = {
        row["weights_sha256"]: row["collected_by"]
        for row in project.rows("SELECT weights_sha256, collected_by FROM weight_versions WHERE is_collected")
    }
    assert collected[hashes[1]] == "learner-1"  # while the run went on
    going = set(hashes.values()) - needed - collected.keys()
    done = project.run("gc")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"removed {len(going)} weight files (")
    assert {file.stem for file in (project.workspace / "artifacts").glob("*/*.safetensors")} == needed
    (counted,) = project.rows("SELECT count(*) AS n FROM weight_versions WHERE is_collected")
    assert counted["n"] == len(collected) + len(going)


def assert_both_are_replayed_equal(project: Any) -> None:
    first, second = (row["run_id"] for row in project.rows("SELECT run_id FROM runs ORDER BY run_id DESC"))
    for run, options in ((first, ["--verify", "--train", "--epoch", "1"]), (second, ["--verify", "--train"])):
        replayed = project.run("replay", run, *options, "--workers", "2")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert replayed.stdout.startswith(f"equal: run {run}: ")
    checkpoint = sorted((project.workspace / "checkpoints" / f"{first}%2Fpolicy").glob("*.safetensors"))[-1]
    data = checkpoint.read_bytes()
    checkpoint.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    replayed = project.run("replay", first, "--verify")
    assert replayed.returncode == 1
    assert checkpoint.name in replayed.stderr
