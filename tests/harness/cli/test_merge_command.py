"""Refusals of `rollstream merge` before it loads a model."""

from pathlib import Path

import pytest

from rollstream.harness.cli.merge import check_base
from rollstream.harness.config.checks import check_model
from rollstream.schemas.errors import ConfigError


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


def test_a_folder_and_a_hub_name_are_taken(tmp_path: Path) -> None:
    for path in (str(tmp_path), "org/name", "name"):
        check_base(path, "run-1@3")
