"""Refusals of `rollstream merge` before it loads a model."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config.checks import check_model
from rollstream.harness.upkeep import merged_model
from rollstream.harness.upkeep.merged_model import check_base, fetch_version, published_version
from rollstream.harness.upkeep.named_version import parse_target
from rollstream.schemas.errors import ArtifactError, ConfigError


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("${MODELS}/small", "${MODELS}/small names the variable MODELS"),
        ("hub/${TOKEN}", "hub/${TOKEN} names the variable TOKEN"),
        ("/models/gone", "/models/gone is not there"),
        ("../gone", "../gone is not there"),
        ("a/b/c", "a/b/c is not there"),
    ],
)
def test_a_base_model_that_is_not_here_is_named_with_the_option_that_gives_it(path: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_base(path, "run-1@3")
    assert str(refused.value) == f"run-1@3: its base model {why}; give its folder as --base_model"


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("", "run-1@3: its weights cannot be read: it has the wrong hash; restore it, or choose another version"),
        ("collected by gc", "run-1@3: its weights do not exist: collected by gc; choose another one"),
    ],
)
def test_damaged_weights_are_not_taken_for_removed_ones(
    monkeypatch: pytest.MonkeyPatch, removed: str, message: str
) -> None:
    async def published(*_: object) -> tuple[SimpleNamespace, str]:
        return SimpleNamespace(artifact=None), removed

    def fetch(_: object) -> Path:
        raise ArtifactError("it has the wrong hash; restore it")

    monkeypatch.setattr(merged_model, "published_version", published)
    store: Any = SimpleNamespace(fetch=fetch)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(fetch_version(MemoryLog(num_partitions=1), store, parse_target("run-1@3"), "run-1@3"))
    assert str(refused.value) == message


def test_a_missing_folder_below_one_that_exists_is_not_taken_for_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run's configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    with pytest.raises(ConfigError, match="its base model examples/base is not there"):
        check_base("examples/base", "run-1@3")
    with pytest.raises(ConfigError, match=r"model\.path: folder examples/base does not exist"):
        check_model("examples/base", "model.path")
    for path in ("org/base", "base"):
        check_base(path, "run-1@3")
        check_model(path, "model.path")
    (tmp_path / "examples" / "base").mkdir()
    check_base("examples/base", "run-1@3")


def test_a_model_group_without_versions_is_answered_with_those_of_the_run(script: SimpleNamespace) -> None:
    async def message_of(target: str) -> str:
        log = MemoryLog(num_partitions=1)
        published = [script.published(0, "run-1/rl")]
        of = [published[0].model_copy(update={"model_group": f"run-1/{name}"}) for name in ("tellers", "seekers")]
        await log.send_all([script.run_started(), *of])
        with pytest.raises(ConfigError) as refused:
            await published_version(log, parse_target(target))
        return str(refused.value)

    assert asyncio.run(message_of("run-1@21")).startswith(
        "run-1/policy@21: there is no such version, the model group has none, those of the run are run-1/seekers, "
        "run-1/tellers; "
    )
    assert asyncio.run(message_of("gone@1")) == "run gone does not exist; `rollstream runs` lists all runs"


def test_a_folder_and_a_hub_name_are_taken(tmp_path: Path) -> None:
    for path in (str(tmp_path), "org/name", "name"):
        check_base(path, "run-1@3")
