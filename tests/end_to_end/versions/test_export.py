"""Two runs of one workspace: one of them exported, replayed from its files, and the metrics made again."""

import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import duckdb
import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

TABLES = "SELECT table_name FROM duckdb_tables() WHERE schema_name = 'log' ORDER BY 1"


def rows_of(path: Path, where: str = "true") -> dict[str, list[Any]]:
    """Rows of every table of a metrics file."""
    with duckdb.connect(str(path), read_only=True) as connection:
        names = [name for (name,) in connection.execute(TABLES).fetchall() if name != "meta"]
        return {
            name: connection.execute(f'SELECT * FROM log."{name}" WHERE {where} ORDER BY ALL').fetchall()
            for name in names
        }


def train(project: Any, name: str, num_epochs: int, **adapter: Any) -> None:
    configuration = project.configuration(num_epochs=num_epochs)
    configuration["trainer_adapters"]["learner"] |= adapter
    done = project.run("finetune", "--config_file", str(project.write(configuration)), "--name", name)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_is_exported_replayed_from_its_files_and_the_metrics_are_made_again(project: Any) -> None:
    train(project, "first", 2, warm_start={"num_epochs": 1, "tasks_per_epoch": 2})
    train(project, "second", 1)
    (run,) = [row["run_id"] for row in project.rows("SELECT run_id FROM runs WHERE run_id LIKE 'first-%'")]
    metrics = project.workspace / "metrics.duckdb"
    grown = project.folder / "grown.duckdb"
    shutil.copy(metrics, grown)
    folder = project.folder / "export"

    assert_refused(project.run("export", "first"), "run first does not exist; `rollstream runs` lists all runs")
    exported = project.run("export", run, "--output", str(folder), "--weights")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith(f"run {run}: ")
    assert_refused(project.run("export", run, "--output", str(folder)), "already exists")

    done = project.run("rebuild", "--from", str(folder), "--output", str(project.folder / "one.duckdb"))
    assert done.returncode == 0, done.stderr
    wanted = rows_of(grown, f"run_id = '{run}'")
    assert len(wanted["step_recorded"]) > 20
    assert rows_of(project.folder / "one.duckdb") == wanted

    metrics.unlink()
    done = project.run("rebuild")
    assert done.returncode == 0, done.stderr
    assert rows_of(metrics) == rows_of(grown)

    (project.workspace / "broker").rename(project.folder / "elsewhere")
    (project.workspace / "artifacts").rename(project.folder / "nowhere")
    replayed = project.run("replay", run, "--verify", "--train", "--export", str(folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.startswith(f"equal: run {run}: ")
    assert_a_what_if_of_it_is_a_run_of_an_empty_workspace(project, run, folder)

    steps = folder / "steps.parquet"
    data = bytearray(steps.read_bytes())
    data[len(data) // 2] ^= 1
    steps.write_bytes(data)
    for command in (["replay", run, "--verify", "--export", str(folder)], ["rebuild", "--from", str(folder)]):
        assert_refused(project.run(*command), "steps.parquet was changed since it was exported")


def assert_a_what_if_of_it_is_a_run_of_an_empty_workspace(project: Any, run: str, folder: Path) -> None:
    """The workspace knows nothing of the recorded run, and the what-if can be exported and replayed itself."""
    other = dataclasses.replace(project, folder=project.folder / "other")
    other.folder.mkdir()
    file = other.write({"trainer_adapters": {"learner": {"optimizer": {"learning_rate": 1e-2}}}}, "what_if.yaml")
    done = other.run("replay", run, "--what-if", str(file), "--export", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    sql = "SELECT epoch, run_id, r.state, parent_run_id FROM epoch_summary JOIN runs r USING (run_id) ORDER BY epoch"
    rows = other.rows(sql)
    made = rows[0]["run_id"]
    assert [tuple(row.values()) for row in rows] == [(epoch, made, "completed", run) for epoch in (0, 1)]
    exported = other.run("export", made, "--output", "again", "--weights")
    assert exported.returncode == 0, exported.stderr
    replayed = other.run("replay", made, "--verify", "--train", "--export", "again")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.startswith(f"equal: run {made}: ")
