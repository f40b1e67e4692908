"""Demonstrators of rollouts that programs outside play: they answer the agents' calls in the model's place."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.agents import demonstrations
from rollstream.producers.rollout.registry import build_environment
from rollstream.schemas.errors import ConfigError, NotAllowedError
from rollstream.schemas.events import RolloutFailed
from rollstream.schemas.permissions import NOTHING, Permissions
from tests.producers.gateway.gateway_rig import play_outside, shop_player

AGENTS = Path(__file__).parents[3] / "examples/agents"
ITEMS = [["apple", 8, 63], ["plum", 7, 84]]


def demonstrator(name: str) -> dict[str, Any]:
    """Settings of a warm start's rollouts."""
    config = {"demonstrator": f"python:examples.agents.demonstrations.{name}"}
    return {"policy": "demonstration", "environment_config": config}


@pytest.fixture
def _without_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for share in ("CALCULATES", "RIGHT_OPERATOR", "ASKS", "RIGHT_COLUMN", "RIGHT_ITEM", "MULTIPLIES"):
        monkeypatch.setattr(demonstrations, share, 1.0)


@pytest.mark.usefixtures("_without_mistakes")
def test_the_shops_demonstrator_uses_both_tools_and_its_tokens_have_no_logprobs(tmp_path):
    inputs = {"question": "What is the price of 4 plum?", "answer": 28, "items": ITEMS}
    played = play_outside(tmp_path, program=shop_player, inputs=inputs, **demonstrator("shop"))
    played.assert_complete()
    steps: list[Any] = [step for step in played.steps if step.llm is not None]
    tool_results = [message["content"] for message in steps[-1].data["input"] if message["role"] == "tool"]
    assert tool_results == ["[[7]]", "28"]
    assert [reward.value for reward in played.rewards] == [1.0]
    assert [step.llm.logprobs for step in steps] == [None, None, None]
    assert [step.data["output"] for step in steps][-1] == "28"


@pytest.mark.usefixtures("_without_mistakes")
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_calculators_demonstrator_answers_a_program(tmp_path):
    played = play_outside(
        tmp_path,
        environment=f"command:node {AGENTS / 'calculator.mjs'}",
        inputs={"question": "3+4=", "answer": 7},
        rollout_timeout_s=60.0,
        **demonstrator("calculator"),
    )
    played.assert_complete()
    assert [step.data["output"][:11] for step in played.steps if step.data is not None] == ["<tool_call>", "7"]
    assert [reward.value for reward in played.rewards] == [1.0]


def test_a_warm_start_without_a_demonstrator_fails_with_the_remedy(tmp_path):
    async def agent(outside: Any) -> None:
        refused = await outside.chat("3+4=", status=400)
        assert "set environment_config.demonstrator" in refused["error"]["message"]
        await outside.end()

    last = play_outside(tmp_path, agent, policy="demonstration").last
    assert isinstance(last, RolloutFailed)
    assert last.cause == "environment_error"
    assert last.message.startswith("demonstrator: EnvironmentRunError: a program outside has no demonstrator; set env")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:examples.agents.demonstrations.shops", "no 'shops'; did you mean shop"),
        ("python:examples.agents.demonstrations.NAMES", "is not a function"),
    ],
)
@pytest.mark.parametrize("environment", ["gateway", "command:true"])
def test_a_demonstrator_that_is_not_a_function_is_refused_by_its_name(
    environment: str, name: str, message: str
) -> None:
    allowed = Permissions.of([name, "command:true"], {})
    with pytest.raises(ConfigError, match=message):
        build_environment(environment, {"demonstrator": name}, allowed)


def test_a_record_may_not_name_a_demonstrator_by_itself() -> None:
    config = {"demonstrator": "python:examples.agents.demonstrations.shop"}
    with pytest.raises(NotAllowedError, match="demonstrator"):
        build_environment("gateway", {**config}, NOTHING)


def test_a_question_of_another_dataset_is_named() -> None:
    with pytest.raises(ValueError, match="no demonstration for 'How much"):
        demonstrations.groups_of(demonstrations.SHOP, "How much?")
