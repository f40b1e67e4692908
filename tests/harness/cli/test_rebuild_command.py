"""The command `rebuild` and what it proposes."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollstream.harness.cli.export import rebuild
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
