"""`export --format`: files for other programs, of exported runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from nat.atif import Trajectory

from rollstream.harness.cli.main import rollstream
from rollstream.harness.datasets.writing import FORMATS
from rollstream.replay.archive.manifest import read_manifest
from rollstream.schemas.errors import ConfigError

EXPORTS = Path(__file__).parents[2] / "golden" / "exports"


def export(output: Path, *options: str, of: str = "grpo", run: str | None = None) -> Result:
    source = EXPORTS / of
    run = read_manifest(source).run_id if run is None else run
    return CliRunner().invoke(rollstream, ["export", run, "--from", str(source), "--output", str(output), *options])


def rows_of(output: Path, *options: str, of: str = "grpo") -> list[dict[str, Any]]:
    done = export(output, *options, of=of)
    assert done.exit_code == 0, done.exception or done.output
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert f"{len(found)} rows in {output}" in done.output
    return found


def test_every_format_has_the_run_s_rollouts(tmp_path: Path) -> None:
    sft = rows_of(tmp_path / "sft.jsonl", "--format", "trl-sft")
    assert len({row["rollout_id"] for row in sft}) == len(sft) == 64
    assert all(row["messages"][-1]["role"] == "assistant" for row in sft)
    openai = rows_of(tmp_path / "openai.jsonl", "--format", "openai-chat")
    assert [row["messages"] for row in openai] == [row["messages"] for row in sft]
    documents = rows_of(tmp_path / "atif.jsonl", "--format", "atif")
    assert [Trajectory.model_validate(row).session_id for row in documents] == [row["rollout_id"] for row in sft]
    rewards = {row["rollout_id"]: row["reward"] for row in sft}
    labelled = rows_of(tmp_path / "kto.jsonl", "--format", "trl-kto", "--min_reward", "0.5")
    assert {row["rollout_id"]: row["label"] for row in labelled} == {name: at >= 0.5 for name, at in rewards.items()}


def test_the_command_offers_every_format() -> None:
    command = rollstream.get_command(click.Context(rollstream), "export")
    assert command is not None
    (kind,) = [option.type for option in command.params if option.name == "format"]
    assert isinstance(kind, click.Choice)
    assert list(kind.choices) == list(FORMATS)


def test_pairs_are_of_scored_candidates_where_a_run_has_them(tmp_path: Path) -> None:
    pairs = rows_of(tmp_path / "dpo.jsonl", "--format", "trl-dpo", of="dpo")
    assert pairs
    assert all(len(row["chosen"]) == len(row["rejected"]) == 1 for row in pairs if row["job_id"].endswith("/dpo"))
    assert all(row["score_chosen"] > row["score_rejected"] for row in pairs)


def test_the_best_rollouts_of_one_agent_are_chosen(tmp_path: Path) -> None:
    best = rows_of(tmp_path / "best.jsonl", "--format", "trl-sft", "--best", "--agent", "agent")
    assert len({row["group_id"] for row in best}) == len(best) > 1


def test_a_run_without_validations_has_no_rows_of_them(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "none.jsonl", "--format", "trl-sft", "--validation") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--from needs --format"),
        (["--format", "trl-kto", "--best"], "--best is for trl-sft, openai-chat and atif"),
        (["--format", "trl-kto", "--partial"], "--partial is for exports without --format"),
        (["--format", "trl-sft", "--weights"], "--weights is for exports without --format"),
        (["--format", "trl-dpo", "--best"], "--best is for trl-sft, openai-chat and atif"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    done = export(tmp_path / "x", *options)
    assert done.exit_code == 2
    assert message in done.output


def test_an_existing_file_an_unknown_agent_and_another_run_are_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    error = export(taken, "--format", "trl-sft").exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"{taken} already exists; remove it, or give another with --output"
    error = export(tmp_path / "x", "--format", "trl-sft", run="other").exception
    assert isinstance(error, ConfigError)
    assert "holds run grpo-" in str(error)
    error = export(tmp_path / "x", "--format", "trl-sft", "--agent", "nobody").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "no trajectory is of agent 'nobody'; give one of agent"


def test_a_changed_trajectory_is_reported_and_no_file_is_left(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXPORTS / "grpo", tmp_path / "export"))
    (folder / "trajectories.parquet").unlink()
    run, output = read_manifest(folder).run_id, tmp_path / "rows.jsonl"
    done = CliRunner().invoke(
        rollstream, ["export", run, "--from", str(folder), "--format", "trl-sft", "--output", str(output)]
    )
    assert done.exit_code != 0
    assert [one.name for one in tmp_path.iterdir()] == ["export"]
