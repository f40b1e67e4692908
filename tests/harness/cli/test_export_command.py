"""The command `export` of a run of which retention has removed records."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rollstream.eventlog.log import ReadableLog
from rollstream.harness.cli.export import export
from rollstream.harness.services import workspace
from rollstream.replay.archive.log import open_export
from rollstream.replay.archive.manifest import Covered, read_manifest, write_manifest
from rollstream.schemas.errors import ArtifactError, TruncatedError

EXPORT = Path(__file__).parents[2] / "golden" / "exports" / "grpo"


def test_the_option_for_what_is_left_is_proposed_and_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(EXPORT, tmp_path / "export"))
    manifest = read_manifest(folder)
    trajectories = manifest.topics["trajectories"]
    (first, *others) = trajectories.partitions
    left = trajectories.model_copy(update={"partitions": (Covered(begin=first.end, end=first.end), *others)})
    write_manifest(folder, manifest.model_copy(update={"topics": {**manifest.topics, "trajectories": left}}))

    def on_log(_layout: Any, _servers: Any, _client: str, use: Callable[[ReadableLog], Awaitable[Any]]) -> Any:
        async def opened() -> Any:
            async with open_export(folder) as (log, _):
                return await use(log)

        return asyncio.run(opened())

    monkeypatch.setattr(workspace, "on_log", on_log)
    asked = [manifest.run_id, "--workspace", str(tmp_path / "ws"), "--output", str(tmp_path / "out")]
    error = CliRunner().invoke(export, asked).exception
    assert isinstance(error, TruncatedError)
    assert "topic trajectories partition 0 is not kept" in str(error)
    assert str(error).endswith("; --partial exports what is left")
    error = CliRunner().invoke(export, [*asked, "--partial"]).exception
    assert isinstance(error, ArtifactError)  # all records are exported; this workspace has no artifacts


def test_a_smallest_reward_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    asked = ["run-1", "--format", "trl-sft", "--min_reward", "nan", "--output", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(export, asked)
    assert result.exit_code == 2
    assert "no reward can be compared with nan; give a number" in result.output
