"""Refusals of `rollstream merge` before it loads a model."""

from pathlib import Path

import pytest

from rollstream.harness.cli.merge import check_base
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


def test_a_folder_and_a_hub_name_are_taken(tmp_path: Path) -> None:
    for path in (str(tmp_path), "org/name", "name"):
        check_base(path, "run-1@3")
