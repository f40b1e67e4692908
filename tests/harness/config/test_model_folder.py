"""The model folder of a run is looked at before it begins."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from rollstream.harness.config.checks import check_hub, check_model
from rollstream.schemas.errors import ConfigError

AT = "trainer_adapters.learner.model.path"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokenizer has no chat template."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return tmp_path


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_tokenizer_without_a_chat_template_is_refused_where_an_engine_loads_it(folder: Path, engine: str) -> None:
    with pytest.raises(ConfigError, match=rf"{AT}: the tokenizer of {folder} has no chat template, .*; add chat_temp"):
        check_model(str(folder), AT, engine)
    for other in ("scripted", "their_engine", ""):
        check_model(str(folder), AT, other)


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "additional_chat_templates/tool.jinja"])
def test_a_template_in_a_file_of_its_own_is_one(folder: Path, file: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("{{ messages }}")
    check_model(str(folder), AT, "transformers")


@pytest.mark.parametrize("written", ['{"chat_template": "{{ messages }}"}', "[]", "{broken", None])
def test_only_what_is_certainly_missing_is_refused(folder: Path, written: str | None) -> None:
    (folder / "tokenizer_config.json").unlink()
    if written is not None:
        (folder / "tokenizer_config.json").write_text(written)
    check_model(str(folder), AT, "vllm")


def test_a_folder_without_a_model_and_none_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{AT}: {tmp_path} does not contain config.json; give a transformers"):
        check_model(str(tmp_path), AT)
    with pytest.raises(ConfigError, match=rf"{AT}: folder {tmp_path}/gone does not exist; give a transformers"):
        check_model(f"{tmp_path}/gone", AT)


def test_a_model_that_is_not_a_folder_must_be_in_the_hubs_cache_or_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    here = f"is neither a folder of {tmp_path} nor"
    offline = (
        f"in the hub's cache {tmp_path}/cache, and HF_HUB_OFFLINE forbids a download; run `hf download models/tiny`"
    )
    with pytest.raises(ConfigError, match=f"{AT}: models/tiny {here} {offline} where it can be, set HF_HOME to the "):
        check_hub("models/tiny", AT)
    with pytest.raises(ConfigError, match=f"{AT}: no name/at all {here} to be had from the hub: "):
        check_hub("no name/at all", AT)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    check_hub("models/tiny", AT)
    snapshot = tmp_path / "cache" / "models--org--model" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a")
    check_hub("org/model", AT)
