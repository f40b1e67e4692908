"""Values of a file's keys that a command overrides, texts in files, and paths below the home folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.yaml import apply_overrides
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.trackers import TensorBoardSettings

Write = Callable[[dict[str, Any]], Path]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a.number", "1e-3", 0.001),
        ("a.name", "7", "7"),
        ("a.names", "x, y", ["x", "y"]),
        ("a.names", "[z]", ["z"]),
        ("a.new.deep", "true", True),
        ("a.name", "null", None),
        ("a.name", "data #1.json", "data #1.json"),
        ("a.name", "a: b", "a: b"),
        ("a.name", "@x", "@x"),
        ("a.name", '"q"', "q"),
        ("a.name", "{kind: x}", {"kind": "x"}),
    ],
)
def test_an_override_sets_a_key_as_the_file_has_it(key: str, text: str, value: Any) -> None:
    written: dict[str, Any] = {"a": {"number": 1, "name": "n", "names": ["x"]}}
    apply_overrides(written, [(key, text)])
    for part in key.split("."):
        written = written[part]
    assert written == value


def test_the_uri_of_an_artifact_store_stays(written: dict[str, Any], write: Write, tmp_path: Path) -> None:
    uri = f"{tmp_path.as_uri()}/artifacts"
    written["trainer_adapters"]["a"]["artifact_uri"] = uri
    assert config_file.load(write(written)).config.adapter.artifact_uri == uri
    override = ("trainer_adapters.a.artifact_uri", f"{uri}-2")
    assert config_file.load(write(written), [override]).config.adapter.artifact_uri == f"{uri}-2"


def test_an_override_reads_a_text_file_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text("Play well.")
    written: dict[str, Any] = {"a": {"name": "n"}}
    apply_overrides(
        written, [("a.name", "file://prompt.txt"), ("a.new", "file://prompt.txt"), ("a.b", "['file://prompt.txt']")]
    )
    assert written == {"a": {"name": "Play well.", "new": "Play well.", "b": ["Play well."]}}
    with pytest.raises(ConfigError, match=r"^--override: a\.name: file://none\.txt: cannot be read: "):
        apply_overrides(written, [("a.name", "file://none.txt")])
    apply_overrides(written, [("a.b", "['file:///srv/mlruns']"), ("a.name", "file:///srv/page.html")])
    assert (written["a"]["b"], written["a"]["name"]) == (["file:///srv/mlruns"], "file:///srv/page.html")


@pytest.mark.parametrize("given", ["[0-9]+", "{x} y"])
def test_an_override_by_a_text_that_is_not_yaml_shows_how_to_write_it(given: str) -> None:
    written: dict[str, Any] = {"a": {"name": "n"}}
    with pytest.raises(ConfigError, match=r"not valid YAML: .*; a text that begins so needs quotes .*: \"'TEXT'\"$"):
        apply_overrides(written, [("a.name", given)])
    apply_overrides(written, [("a.name", f"'{given}'")])
    assert written["a"]["name"] == given


@pytest.mark.parametrize(
    ("key", "reported"),
    [
        ("trainers.tt.planning", "trainers.tt is not defined in the file; defined: t"),
        ("trainer_adapters.learner.seed", "trainer_adapters.learner is not defined in the file; defined: a"),
        ("llms.modle.temperature", "llms.modle is not defined in the file; did you mean llms.model?"),
        ("llms.modle", "llms.modle is not defined in the file; did you mean llms.model?"),
        ("trainers.tt", "trainers.tt is not defined in the file; defined: t"),
        ("finetuning.trainer.x", "finetuning.trainer is a value, not a section; give the path of a key"),
        ("finetuning..x", "give a dotted path such as finetuning.num_epochs"),
    ],
)
def test_an_override_of_a_path_that_is_not_there_is_named(
    written: dict[str, Any], write: Write, key: str, reported: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config_file.load(write(written | {"llms": {"model": {"_type": "openai"}}}), [(key, "1")])
    assert str(error.value) == f"--override {key}: {reported}"


def test_an_override_of_an_unknown_key_is_named_with_the_nearest(written: dict[str, Any], write: Write) -> None:
    with pytest.raises(ConfigError, match=r"finetuning.epochs: unknown key; did you mean num_epochs?"):
        config_file.load(write(written), [("finetuning.epochs", "1")])


def test_a_tilde_is_the_home_of_the_user_in_every_path(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written["eval"] = {"general": {"dataset": {"file_path": "~/d.jsonl"}}}
    written["trainers"]["t"]["trackers"] = [{"kind": "tensorboard", "log_dir": "~/logs"}]
    engine = {"kind": "vllm", "folder": "~/weights", "executable": "~/venv/bin/vllm"}
    written["trajectory_builders"]["b"]["engine"] = engine
    written["trainer_adapters"]["a"]["endpoint"] = {"token_file": "~/token"}
    run = {"validation_dataset": "~/v.jsonl", "validation_config_file": "~/v.yaml"}
    written["finetuning"] |= {"output_dir": "~/out", "run_configuration": run}
    config = config_file.resolve(written).config
    assert config.dataset is not None
    assert config.validation is not None
    assert config.validation.dataset is not None
    assert config.served is not None
    assert isinstance(config.builder.engine, VllmSettings)
    assert isinstance(config.trainer.trackers[0], TensorBoardSettings)
    found = [config.dataset.file_path, config.validation.dataset.file_path, config.validation.config]
    found += [config.trainer.trackers[0].folder, config.builder.engine.folder, config.builder.engine.executable]
    found += [config.served.token_file, config.finetuning.output_dir]
    names = "d.jsonl v.jsonl v.yaml logs weights venv/bin/vllm token out"
    assert [str(path) for path in found] == [str(tmp_path / name) for name in names.split()]
