"""A new run's output folder holds nothing of an earlier run but in `earlier`."""

import asyncio
import io
import uuid
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import RunLocation
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.earlier_output import move_earlier_output
from rollstream.harness.runs.run_context import RunRequest, WorkspaceLease, connected
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings

MODEL = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
HISTORY = ("training_metrics.jsonl", "reward_history.json", "reward_plot.png")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


def leave(folder: Path, *names: str, text: str = "first") -> None:
    for name in names:
        (folder / name).write_text(text)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_model_and_histories_go_aside_and_files_of_others_stay(written: dict[str, Any], output: Path) -> None:
    config = config_file.resolve(written).config
    assert move_earlier_output(config) is None
    leave(output, *MODEL, *HISTORY, "submissions.jsonl", "notes.txt")
    assert move_earlier_output(config) == output / "earlier"
    assert names(output) == {"earlier", "submissions.jsonl", "notes.txt"}
    assert names(output / "earlier") == {*MODEL, *HISTORY}
    leave(output, *HISTORY, text="a run that failed")
    assert move_earlier_output(config) == output / "earlier-2"
    assert names(output / "earlier-2") == set(HISTORY)
    assert names(output / "earlier") == {*MODEL, *HISTORY}, "no model is ever removed"
    (output / "earlier-3").symlink_to(output / "nowhere")
    leave(output, *MODEL)
    assert move_earlier_output(config) == output / "earlier-4"


def test_a_folder_that_the_base_model_comes_from_stays_whole(written: dict[str, Any], output: Path) -> None:
    leave(output, *MODEL)
    written["trainer_adapters"]["a"]["model"]["path"] = str(output)
    assert move_earlier_output(config_file.resolve(written).config) is None
    assert names(output) == set(MODEL)


def test_configuration_files_without_a_model_are_nobodys_run(written: dict[str, Any], output: Path) -> None:
    leave(output, "config.json", "tokenizer.json")
    assert move_earlier_output(config_file.resolve(written).config) is None
    assert names(output) == {"config.json", "tokenizer.json"}


@pytest.mark.kafka
def test_a_run_that_is_refused_at_its_start_leaves_the_folder_as_it_is(
    written: dict[str, Any], output: Path, kafka: KafkaSettings, tmp_path: Path
) -> None:
    leave(output, *MODEL, *HISTORY)
    written["trajectory_builders"]["b"]["bootstrap_servers"] = kafka.bootstrap_servers
    written["trainer_adapters"]["a"]["endpoint"] = {"port": 0, "token": "${REFUSED_TEST_TOKEN}"}
    (tmp_path / "examples.jsonl").write_text('{"id": "x", "question": "1+1", "answer": "2"}\n')
    written["eval"] = {"general": {"dataset": {"_type": "jsonl", "file_path": str(tmp_path / "examples.jsonl")}}}
    loaded = config_file.resolve(written, {"REFUSED_TEST_TOKEN": "not set where it begins"})
    own = kafka.model_copy(update={"topic_prefix": f"refused-{uuid.uuid4().hex[:8]}."})
    location = RunLocation(own, str(tmp_path / "artifacts"), tmp_path / ".rollstream")
    shown = io.StringIO()

    async def begin() -> None:
        async with connected(
            RunRequest(loaded, location.workspace, "refused"), WorkspaceLease(location, None), Display(shown)
        ):
            raise AssertionError("it began")

    with pytest.raises(ConfigError, match="REFUSED_TEST_TOKEN is not set"):
        asyncio.run(begin())
    assert names(output) == {*MODEL, *HISTORY}
    assert "earlier" not in shown.getvalue()
