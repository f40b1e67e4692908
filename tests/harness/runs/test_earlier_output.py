"""A new run's output folder holds nothing of an earlier run but in `earlier`."""

import asyncio
import io
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import RunLocation
from rollstream.harness.runs import earlier_output
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.earlier_output import (
    check_output_dir,
    list_groups,
    move_earlier_output,
    take_output_dir,
)
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


def test_a_run_that_goes_on_finds_its_own_files_and_those_of_the_run_between_are_kept(
    written: dict[str, Any], output: Path
) -> None:
    config = config_file.resolve(written).config
    assert take_output_dir(config, "a", is_new=True) is None
    leave(output, *HISTORY, text="a")
    assert take_output_dir(config, "b", is_new=True) == output / "earlier"
    leave(output, *HISTORY, *MODEL, text="b")
    assert take_output_dir(config, "b", is_new=False) is None
    for run, kept in (("a", "b"), ("b", "a"), ("a", "b")):
        earlier = take_output_dir(config, run, is_new=False)
        assert earlier is not None
        assert {path.read_text() for path in output.iterdir() if path.is_file()} == {run}
        assert {path.read_text() for path in earlier.iterdir()} == {kept}
        assert ((output / MODEL[0]).exists(), (earlier / MODEL[0]).exists()) == (run == "b", kept == "b")


def test_files_of_a_run_that_goes_on_come_back_where_a_kill_came_before_they_had(
    written: dict[str, Any], output: Path
) -> None:
    config = config_file.resolve(written).config
    take_output_dir(config, "a", is_new=True)
    leave(output, *HISTORY, text="a")
    take_output_dir(config, "b", is_new=True)
    leave(output, *HISTORY, text="b")
    move_earlier_output(config)
    assert names(output) == {"earlier", "earlier-2"}
    take_output_dir(config, "a", is_new=False)
    assert {path.read_text() for path in output.iterdir() if path.is_file()} == {"a"}
    assert {path.read_text() for path in (output / "earlier-2").iterdir()} == {"b"}


def test_a_folder_that_the_base_model_comes_from_stays_whole(written: dict[str, Any], output: Path) -> None:
    leave(output, *MODEL)
    written["trainer_adapters"]["a"]["model"]["path"] = str(output)
    assert move_earlier_output(config_file.resolve(written).config) is None
    assert names(output) == set(MODEL)


def test_configuration_files_without_a_model_are_not_an_earlier_run(written: dict[str, Any], output: Path) -> None:
    leave(output, "config.json", "tokenizer.json")
    assert move_earlier_output(config_file.resolve(written).config) is None
    assert names(output) == {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("num_moved", range(len(MODEL) + len(HISTORY)))
def test_no_file_of_an_earlier_run_stays_where_a_kill_came_between_two_moves(
    written: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch, num_moved: int
) -> None:
    config = config_file.resolve(written).config
    leave(output, *MODEL, *HISTORY)
    moved: list[Path] = []

    def move(path: Path, target: Path) -> None:
        if len(moved) == num_moved:
            raise KeyboardInterrupt
        moved.append(target)
        os.replace(path, target)

    monkeypatch.setattr(earlier_output, "move", move)
    with pytest.raises(KeyboardInterrupt):
        move_earlier_output(config)
    monkeypatch.undo()
    move_earlier_output(config)
    found = [path.name for path in output.rglob("*") if path.is_file() and path.parent != output]
    assert sorted(found) == sorted([*MODEL, *HISTORY])


def test_a_new_run_with_the_id_of_another_workspace_keeps_its_files_when_it_goes_on(
    written: dict[str, Any], output: Path
) -> None:
    config = config_file.resolve(written).config
    for text in ("first", "second"):
        take_output_dir(config, "demo", is_new=True)
        leave(output, *MODEL, text=text)
    assert take_output_dir(config, "demo", is_new=False) is None
    assert {(output / name).read_text() for name in MODEL} == {"second"}
    assert {(output / "earlier" / name).read_text() for name in MODEL} == {"first"}


def several_groups(written: dict[str, Any]) -> dict[str, Any]:
    written["trajectory_builders"]["b"]["agents"] = {"prover": "provers", "verifier": "verifiers"}
    return written


def test_the_models_of_model_groups_go_aside_folder_by_folder(written: dict[str, Any], output: Path) -> None:
    for group in ("provers", "verifiers", "others"):
        (output / group).mkdir()
        leave(output / group, *MODEL)
    leave(output / "provers", "notes.txt")
    config = config_file.resolve(several_groups(written)).config
    assert move_earlier_output(config) == output / "earlier"
    assert names(output) == {"earlier", "provers", "others"}
    assert names(output / "provers") == {"notes.txt"}
    assert names(output / "earlier") == {"provers", "verifiers"}
    assert names(output / "earlier" / "provers") == names(output / "earlier" / "verifiers") == set(MODEL)
    assert names(output / "others") == set(MODEL), "the output folder of another run may lie in this one"


def test_a_run_with_other_groups_moves_the_folders_that_the_earlier_run_has_listed(
    written: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    list_groups(output, ["provers", "verifiers", "kept", "../elsewhere"])
    for folder in (output / "provers", output / "verifiers", output / "kept", tmp_path / "elsewhere"):
        folder.mkdir()
        leave(folder, *MODEL)
    written["trainer_adapters"]["a"]["model"]["path"] = str(output / "kept")
    assert move_earlier_output(config_file.resolve(written).config) == output / "earlier"
    assert names(output) == {"earlier", "kept"}
    assert names(output / "earlier") == {"model_groups.json", "provers", "verifiers"}
    assert names(output / "kept") == names(tmp_path / "elsewhere") == set(MODEL), "a base model stays"


@pytest.mark.kafka
def test_a_list_of_groups_names_no_folder_outside(written: dict[str, Any], output: Path) -> None:
    leave(output.parent, *MODEL)
    list_groups(output, ["..", ".", ""])
    assert move_earlier_output(config_file.resolve(written).config) == output / "earlier"
    assert names(output / "earlier") == {"model_groups.json"}
    assert {*MODEL} <= names(output.parent)


def test_models_behind_a_link_stay_where_it_leads(written: dict[str, Any], output: Path) -> None:
    disk = output.parent / "disk"
    disk.mkdir()
    leave(disk, *MODEL)
    (output / "provers").symlink_to(disk)
    list_groups(output, ["provers"])
    assert move_earlier_output(config_file.resolve(written).config) == output / "earlier"
    assert names(disk / "earlier") == set(MODEL)


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


@pytest.mark.parametrize("folder", ["model", "elsewhere/../model", "teacher", "groups"])
def test_the_folder_of_a_model_or_a_teacher_is_not_written_to(
    written: dict[str, Any], tmp_path: Path, folder: str
) -> None:
    adapter = written["trainer_adapters"]["a"]
    check_output_dir(config_file.resolve(written).config)
    adapter["algorithm"] = {"name": "opd", "teacher": str(tmp_path / "teacher")}
    if folder == "groups":
        (tmp_path / "groups").mkdir()
        (tmp_path / "groups" / "provers").symlink_to(tmp_path / "model")
        written["trajectory_builders"]["b"]["agents"] = {"prover": "provers", "verifier": "verifiers"}
    written["finetuning"]["output_dir"] = str(tmp_path / folder)
    adapter["model"]["lora"] = {}
    check_output_dir(config_file.resolve(written).config)  # an adapter replaces none of the model's files
    del adapter["model"]["lora"]
    with pytest.raises(ConfigError, match=r"finetuning\.output_dir: .* is the folder of a model or teacher of the run"):
        check_output_dir(config_file.resolve(written).config)
