"""Names and python paths of environments and rewards, and how wrong ones are told."""

from typing import Any

import pytest

from rollstream.producers import registry
from rollstream.producers.environment import Environment, FunctionEnvironment
from rollstream.producers.environments.guess_number import GuessNumber
from rollstream.producers.rewards import FinishedRollout
from rollstream.schemas.errors import ConfigError

MODULE = """
from rollstream.producers.environment import Environment

SIZE = 3

class Walk(Environment):
    def __init__(self, size=1):
        self.size = size

    async def run(self, session):
        pass

async def stroll(session, pace=1):
    pass

def judge(rollout):
    return 1.0
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    name = f"walks_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_built_in_environments_are_found_by_name():
    assert registry.environment("guess_number") is GuessNumber
    needed = {"remote_workflow": {"endpoint": "http://127.0.0.1:8000"}}
    for name in registry.BUILT_IN:
        assert isinstance(registry.build_environment(name, needed.get(name, {}), {}), Environment)


def test_classes_and_functions_are_found_by_python_path(module):
    walk: Any = registry.build_environment(f"python:{module}.Walk", {"size": "${SIZE}"}, {"SIZE": "7"})
    assert walk.size == "7"
    stroll = registry.build_environment(f"python:{module}.stroll", {"pace": 2}, {})
    assert isinstance(stroll, FunctionEnvironment)
    assert registry.reward(f"python:{module}.judge")(FinishedRollout({}, 1, (), (), {}, "done")) == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guess_nummer", "did you mean guess_number"),
        ("zzz", "known are: .*arithmetic.*tic_tac_toe"),
        ("python:nothing", "python:module.attribute"),
        ("python:no_such_module.thing", "no_such_module cannot be imported"),
        ("python:rollstream.producers.registry.rewerd", "did you mean reward"),
        ("python:rollstream.producers.registry.PYTHON", "is a str"),
        ("python:rollstream.producers.registry.environment", "missing a required argument"),
    ],
)
def test_an_unknown_environment_is_named(name, words):
    with pytest.raises(ConfigError, match=words):
        registry.build_environment(name, {}, {})


def test_an_unknown_configuration_key_is_named_with_the_nearest(module):
    with pytest.raises(ConfigError, match=r"environment_config.hihg: unknown key; did you mean high\?"):
        registry.build_environment("guess_number", {"hihg": 3}, {})
    with pytest.raises(ConfigError, match=r"environment_config.speed: unknown key; known are: pace"):
        registry.build_environment(f"python:{module}.stroll", {"speed": 3}, {})


def test_a_value_that_the_environment_refuses_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"guess_number: environment_config: low \(5\) is above high \(1\)"):
        registry.build_environment("guess_number", {"low": 5, "high": 1}, {})


def test_a_variable_that_is_not_set_is_named():
    with pytest.raises(ConfigError, match=r"environment_config\.high: environment variable TOP is not set"):
        registry.build_environment("guess_number", {"high": "${TOP}"}, {})


def test_an_unknown_reward_is_named():
    registry.register_reward("test_politeness")(len)
    with pytest.raises(ConfigError, match="did you mean test_politeness"):
        registry.reward("test_politenes")


def test_one_name_is_one_thing():
    registry.register_reward("test_taken")(len)
    registry.register_reward("test_taken")(len)
    with pytest.raises(ConfigError, match=r"test_taken is registered twice: by builtins.len and by builtins.sum"):
        registry.register_reward("test_taken")(sum)
