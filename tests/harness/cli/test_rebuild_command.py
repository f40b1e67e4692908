"""The command `rebuild` and what it proposes."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from rollstream.eventlog.kafka.topic_ids import check_topics
from rollstream.harness.cli.export import rebuild
from rollstream.harness.config import file as config_file
from rollstream.harness.runs.preflight import check_metrics
from rollstream.metrics.projection.connection import MetricsFileError, metrics_file
from rollstream.metrics.projection.database import Database
from rollstream.replay.archive.manifest import Covered, read_manifest, write_manifest
from rollstream.schemas.errors import TruncatedError

EXPORT = Path(__file__).parents[2] / "golden" / "exports" / "grpo"


@pytest.mark.parametrize("options", [[], ["--partial"]])
def test_an_option_without_effect_on_an_export_is_not_proposed(tmp_path: Path, options: list[str]) -> None:
    folder = Path(shutil.copytree(EXPORT, tmp_path / "export"))
    manifest = read_manifest(folder)
    lost = manifest.topics["groups"].model_copy(update={"partitions": (Covered(begin=500, end=192),)})
    write_manifest(folder, manifest.model_copy(update={"topics": {**manifest.topics, "groups": lost}}))
    error = CliRunner().invoke(rebuild, ["--from", str(folder), "--workspace", str(tmp_path), *options]).exception
    assert isinstance(error, TruncatedError)
    assert "is not kept" in str(error)
    assert "--partial" not in str(error)


@pytest.mark.parametrize("is_of_file", [True, False], ids=["file", "log"])
def test_an_export_of_another_cluster_does_not_replace_the_metrics_of_a_workspace(
    tmp_path: Path, is_of_file: bool
) -> None:
    arguments = ["--from", str(EXPORT), "--workspace", str(tmp_path)]
    if is_of_file:
        database = Database(metrics_file(tmp_path))
        database.claim_cluster("own")
        database.close()
    else:
        check_topics(tmp_path, "own", {"groups": "id"})
    error = CliRunner().invoke(rebuild, arguments).exception
    assert isinstance(error, MetricsFileError)
    assert "own" in str(error)
    assert "give another file with --output" in str(error)
    other = tmp_path / "other.duckdb"
    assert CliRunner().invoke(rebuild, [*arguments, "--output", str(other)]).exit_code == 0
    assert other.exists()


@pytest.mark.parametrize("damage", ["cut", "overwritten", "emptied", "without its own table"])
def test_a_damaged_metrics_file_is_replaced_from_an_export_and_named_before_a_run(
    damage: str, written: dict[str, Any], tmp_path: Path
) -> None:
    path, arguments = metrics_file(tmp_path), ["--from", str(EXPORT), "--workspace", str(tmp_path)]
    assert CliRunner().invoke(rebuild, arguments).exit_code == 0
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:20_000])
    elif damage == "overwritten":
        content = bytearray(path.read_bytes())
        content[4096:4200] = content[8192:8296] = bytes(104)
        path.write_bytes(content)
    else:
        path.unlink()
        with duckdb.connect(str(path)) as connection:
            connection.execute("CREATE SCHEMA log" if damage == "without its own table" else "SELECT 1")
    with pytest.raises(MetricsFileError, match="remove it") if damage != "emptied" else nullcontext():
        check_metrics(config_file.resolve(written).config, tmp_path, "own")
    done = CliRunner().invoke(rebuild, arguments)
    assert done.exit_code == 0, done.exception
    database = Database(path)
    database.claim_cluster(read_manifest(EXPORT).cluster_id or "")
    database.close()


def test_a_metrics_file_in_use_is_not_replaced_from_an_export(tmp_path: Path) -> None:
    Database(metrics_file(tmp_path)).close()
    query = f"import duckdb; c = duckdb.connect({str(metrics_file(tmp_path))!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", query], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        error = CliRunner().invoke(rebuild, ["--from", str(EXPORT), "--workspace", str(tmp_path)]).exception
        child.communicate(b"\n")
    assert isinstance(error, MetricsFileError)
    assert "in use by another process" in str(error)


def test_metrics_of_an_export_are_made_in_a_workspace_without_runs_and_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert CliRunner().invoke(rebuild, ["--from", str(EXPORT), "--workspace", str(tmp_path)]).exit_code == 0
    assert metrics_file(tmp_path).exists()
