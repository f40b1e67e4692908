"""Names and python paths of environments and rewards, and how wrong ones are told."""

from typing import Any

import pytest

from rollstream.producers.attempt import refusal
from rollstream.producers.environments.guess_number import GuessNumber
from rollstream.producers.rollout import registry
from rollstream.producers.rollout.environment import Environment, FunctionEnvironment
from rollstream.producers.rollout.rewards import FinishedRollout
from rollstream.schemas.errors import ConfigError, NotAllowedError
from rollstream.schemas.permissions import NOTHING, Permissions, named_by
from rollstream.schemas.settings import RolloutSettings

MODULE = """
from rollstream.producers.rollout.environment import Environment

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


def allowing(*names, **env):
    return Permissions.of(names, env)


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    name = f"walks_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_built_in_environments_are_found_by_name():
    assert registry.environment("guess_number", NOTHING) is GuessNumber
    needed = {"remote_workflow": {"endpoint": "http://127.0.0.1:8000"}}
    for name in registry.BUILT_IN:
        assert isinstance(
            registry.build_environment(name, needed.get(name, {}), Permissions.of(["http://127.0.0.1:8000"], {})),
            Environment,
        )


def test_classes_and_functions_are_found_by_python_path(module):
    environment: Any = registry.build_environment(
        f"python:{module}.Walk", {"size": "${SIZE}"}, allowing(f"python:{module}.Walk", "${SIZE}", SIZE="7")
    )
    assert environment.size == "7"
    stroll = registry.build_environment(f"python:{module}.stroll", {"pace": 2}, allowing(f"python:{module}.stroll"))
    assert isinstance(stroll, FunctionEnvironment)
    assert (
        registry.reward(f"python:{module}.judge", allowing(f"python:{module}.judge"))(
            FinishedRollout({}, 1, (), (), {}, "done")
        )
        == 1.0
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guess_nummer", "did you mean guess_number"),
        ("zzz", "known names: .*arithmetic.*tic_tac_toe"),
        ("python:nothing", "python:module.attribute"),
        ("python:no_such_module.thing", "no_such_module cannot be imported"),
        ("python:rollstream.producers.rollout.registry.rewerd", "did you mean reward"),
        ("python:rollstream.schemas.permissions.CODE", "is a str"),
        ("python:rollstream.producers.rollout.registry.environment", "neither an Environment class nor an async"),
    ],
)
def test_an_unknown_environment_is_named(name, words):
    with pytest.raises(ConfigError, match=words):
        registry.build_environment(name, {}, allowing(*([name] if name.startswith("python:") else [])))


def test_an_unknown_configuration_key_is_named_with_the_nearest(module):
    with pytest.raises(ConfigError, match=r"environment_config.hihg: unknown key; did you mean high\?"):
        registry.build_environment("guess_number", {"hihg": 3}, NOTHING)
    with pytest.raises(ConfigError, match=r"environment_config.speed: unknown key; known keys: pace"):
        registry.build_environment(f"python:{module}.stroll", {"speed": 3}, allowing(f"python:{module}.stroll"))


def test_a_value_that_the_environment_refuses_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"guess_number: environment_config: low \(5\) is above high \(1\)"):
        registry.build_environment("guess_number", {"low": 5, "high": 1}, NOTHING)


def test_a_value_that_code_of_users_refuses_is_named_with_file_and_line(tmp_path, monkeypatch):
    text = "def checked(tries):\n    return int(tries)\n\n\nclass Own(Environment):\n    def __init__(self, tries):\n"
    head = "from rollstream.producers.rollout.environment import Environment\n\n\n"
    end = "        self.tries = checked(tries)\n\n    async def run(self, session): ...\n"
    (tmp_path / "refusing_world.py").write_text(head + text + end)
    monkeypatch.syspath_prepend(tmp_path)
    name = "python:refusing_world.Own"
    location = r"environment_config: ValueError \(refusing_world\.py line 5, in checked\): invalid literal"
    with pytest.raises(ConfigError, match=location):
        registry.build_environment(name, {"tries": "two"}, allowing(name))


def test_a_variable_that_is_not_set_is_named():
    with pytest.raises(ConfigError, match=r"environment_config\.high: environment variable TOP is not set"):
        registry.build_environment("guess_number", {"high": "${TOP}"}, allowing("${TOP}"))


def test_an_unknown_reward_is_named():
    registry.register_reward("test_politeness")(len)
    with pytest.raises(ConfigError, match="did you mean test_politeness"):
        registry.reward("test_politenes", NOTHING)


def test_one_name_is_one_thing():
    registry.register_reward("test_taken")(len)
    registry.register_reward("test_taken")(len)
    with pytest.raises(ConfigError, match=r"'test_taken' is registered twice: by builtins.len and by builtins.sum"):
        registry.register_reward("test_taken")(sum)


PROTOCOL = "python:no_such_module.Protocol"


@pytest.mark.parametrize("written", [PROTOCOL, {"name": PROTOCOL, "max_rounds": 3}])
def test_code_in_a_configuration_is_imported_only_where_it_is_allowed(written):
    with pytest.raises(NotAllowedError, match=r"environment_config\.protocol: .*no_such_module.* is not allowed"):
        registry.build_environment("bit_proof", {"protocol": written}, NOTHING)
    settings = RolloutSettings(environment="bit_proof", environment_config={"protocol": written})
    assert refusal(settings, NOTHING) is not None
    trusted = allowing(*named_by(settings))
    assert refusal(settings, trusted) is None
    with pytest.raises(ConfigError, match="module no_such_module cannot be imported"):
        registry.build_environment("bit_proof", {"protocol": written}, trusted)


def test_an_agent_that_the_run_does_not_have_is_named():
    played = registry.build_environment("bit_proof", {"protocol": "adp"}, NOTHING)
    played.check_agents(["verifier", "prover", "judge"])
    with pytest.raises(ConfigError, match=r"the run has no prover; set .*agents: \[prover, verifier\]"):
        played.check_agents({"verifier": "run-1/policy"})
    registry.build_environment("guess_number", {}, NOTHING).check_agents(["anybody"])
