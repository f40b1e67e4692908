"""The contract of `Environment`, run on every built-in one: what a producer relies on before it plays a rollout."""

import inspect
from typing import Any

import pytest

from rollstream.producers.rollout import registry
from rollstream.producers.rollout.environment import Environment
from rollstream.schemas.errors import ConfigError, EnvironmentRunError
from rollstream.schemas.permissions import Permissions

PERMISSIONS = Permissions.of((), {})
CONFIG: dict[str, dict[str, Any]] = {"remote_workflow": {"endpoint": "http://127.0.0.1:1"}}
"""Configuration without which an environment cannot be built."""


@pytest.fixture(params=registry.BUILT_IN)
def kind(request: pytest.FixtureRequest) -> Any:
    return registry.environment(request.param, PERMISSIONS)


def built(kind: Any) -> Environment:
    return kind(**CONFIG.get(kind.__module__.rpartition(".")[2], {}))


def test_each_name_is_a_class_that_plays_by_a_coroutine(kind: Any) -> None:
    assert issubclass(kind, Environment)
    assert inspect.iscoroutinefunction(kind.run)


def test_keys_that_hold_urls_or_code_are_parameters(kind: Any) -> None:
    assert {*kind.URLS, *kind.CODE} <= {*inspect.signature(kind).parameters}


def examples(kind: Any, seed: int) -> list[Any]:
    """Five; none of an environment that asks for a dataset."""
    try:
        return built(kind).examples(5, seed)
    except EnvironmentRunError as error:
        return [] if "name a dataset" in str(error) else ["no remedy"]


@pytest.mark.parametrize("seed", [0, 7])
def test_equal_seeds_give_equal_examples_and_as_many_as_wanted(kind: Any, seed: int) -> None:
    found = examples(kind, seed)
    assert found == examples(kind, seed)
    assert len(found) in (0, 5)


def test_missing_agents_are_named_and_others_accepted(kind: Any) -> None:
    environment = built(kind)
    required = environment.required_agents()
    environment.check_agents([*required, "another"])
    if required:
        with pytest.raises(ConfigError, match=rf"the run has no .*{required[-1]}"):
            environment.check_agents(required[:-1])


def test_missing_inputs_are_named_and_others_accepted(kind: Any) -> None:
    environment = built(kind)
    required = environment.required_inputs()
    environment.check_inputs(dict.fromkeys([*required, "another"]), "x")
    if required:
        with pytest.raises(ConfigError, match=rf"example 'x' has no key '{required[-1]}', .*its keys are: .*another"):
            environment.check_inputs(dict.fromkeys([*required[:-1], "another"]), "x")
