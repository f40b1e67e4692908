"""The command `rebuild` and what it proposes."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollstream.eventlog.kafka.topic_ids import check_topics
from rollstream.harness.cli.export import rebuild
from rollstream.metrics.projection.database import Database, MetricsFileError, metrics_file
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


def test_metrics_of_an_export_are_made_in_a_workspace_without_runs_and_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert CliRunner().invoke(rebuild, ["--from", str(EXPORT), "--workspace", str(tmp_path)]).exit_code == 0
    assert metrics_file(tmp_path).exists()
