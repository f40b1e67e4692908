"""A teacher's server in a configuration: what the run's learner may ask, and what is refused before the run."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config.checks import check_teacher_settings
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import OpdSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.permissions import named_by_teacher
from rollstream.schemas.settings import Sampling

URL = "http://teacher:8000"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_tiny_model(tmp_path / "model", seed=0, hidden_size=16, intermediate_size=32))


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.7}])
def test_sampling_that_a_server_cannot_score_is_refused_before_the_run(model: str, sampling: dict[str, Any]) -> None:
    check_teacher_settings(OpdSettings(teacher=model), Sampling(**sampling), model, "algorithm.teacher")
    with pytest.raises(ConfigError, match=r"^algorithm\.teacher_url: .*sample with temperature 1 and without"):
        check_teacher_settings(
            OpdSettings(teacher=model, teacher_url=URL), Sampling(**sampling), model, "algorithm.teacher"
        )


def test_an_invalid_teacher_url_is_refused_before_the_run(model: str) -> None:
    check_teacher_settings(OpdSettings(teacher=model, teacher_url=URL), Sampling(), model, "algorithm.teacher")
    with pytest.raises(ConfigError, match=r'^algorithm\.teacher_url: "teacher:8000" must be a URL'):
        check_teacher_settings(
            OpdSettings(teacher=model, teacher_url="teacher:8000"), Sampling(), model, "algorithm.teacher"
        )


def test_the_runs_own_learner_may_ask_the_server(model: str) -> None:
    assert URL in named_by_teacher(OpdSettings(teacher=model, teacher_url=URL))
    assert URL not in named_by_teacher(OpdSettings(teacher=model))


def test_a_served_model_group_is_refused_as_the_name_of_a_teacher() -> None:
    remedy = "is a model group that an endpoint serves; give the folder or hub name.*algorithm.teacher_url: http"
    with pytest.raises(ConfigError, match=rf"^algorithm\.teacher: judges {remedy}"):
        check_teacher_settings(
            OpdSettings(teacher="judges"), Sampling(), "m", "algorithm.teacher", {"judges": object()}
        )
