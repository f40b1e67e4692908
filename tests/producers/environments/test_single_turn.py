"""The environment of one question: its prompt, its demonstrations, and rewards by evaluators alone."""

from typing import Any

import pytest

from rollstream.producers.environments.single_turn import SingleTurn
from rollstream.producers.rollout.registry import build_environment
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import RolloutFailed
from rollstream.schemas.permissions import NOTHING
from tests.producers.conftest import answers, task_of

ROW: dict[str, Any] = {"question": "1+3=", "answer": 4, "a": 1, "of": ["x", "é"]}


def task(*, inputs: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A task that is scored by an evaluator, as one of a run with `exact_match` is."""
    scored = {"rewards": ("right",), "evaluators": {"right": {"_type": "exact_match"}}} | settings
    return task_of("single_turn", inputs=ROW if inputs is None else inputs, environment_config=config or {}, **scored)


def messages(played: Any) -> Any:
    return [(one["role"], one["content"]) for one in played.steps[0].data["input"]]


@pytest.mark.parametrize(("answer", "reward"), [("4", 1.0), (" 4\n", 1.0), ("5", 0.0), ("", 0.0)])
def test_an_evaluator_alone_scores_the_answer(play: Any, answer: str, reward: float) -> None:
    played = play(task(), answers(answer))
    played.assert_complete()
    assert messages(played) == [("user", "1+3=")]
    assert [(one.name, one.value) for one in played.rewards] == [("right", reward)]
    assert len(played.texts()) == 1


def test_a_prompt_is_filled_with_the_inputs_after_the_system_message(play: Any) -> None:
    config = {"prompt": "{{{a}}}: {question} of {of}, {a}", "system": "One {number}."}
    played = play(task(config=config), answers("4"))
    assert messages(played) == [("system", "One {number}."), ("user", '{1}: 1+3= of ["x", "é"], 1')]


def test_the_first_agent_answers(play: Any) -> None:
    played = play(task(agents={"solver": "run-1/policy"}), answers("4"))
    assert [step.agent for step in played.steps] == ["solver"]


def test_a_key_that_an_example_lacks_is_named_with_the_example(play: Any) -> None:
    last = play(task(inputs={"text": "1+3="}), answers("4")).last
    assert isinstance(last, RolloutFailed)
    assert last.message.startswith(
        "environment single_turn: example 'x0' has no key 'question', which environment SingleTurn needs; its keys "
        "are: text; correct environment_config, or add the key to the dataset"
    )


def test_a_rollout_that_nobody_scores_fails_and_names_the_remedy(play: Any) -> None:
    last = play(task(rewards=(), evaluators={}), answers("4")).last
    assert isinstance(last, RolloutFailed)
    assert "name a reward function or evaluator that scores them (finetuning.reward_function.name)" in last.message


def test_the_demonstrator_gives_the_right_answer(play: Any) -> None:
    played = play(task(policy="demonstration"))
    assert played.texts() == ["4"]
    last = play(task(policy="demonstration", inputs={"question": "1+3="})).last
    assert isinstance(last, RolloutFailed)
    assert "no key 'answer' to demonstrate" in last.message


@pytest.mark.parametrize("prompt", ["{", "}", "{}", "{a:>99999999999}", "{a!r}", '{"a": 1}'])
def test_a_prompt_that_is_not_a_template_is_refused(prompt: str) -> None:
    with pytest.raises(ConfigError, match=r"environment_config: prompt: .*; write a key of the example as"):
        build_environment("single_turn", {"prompt": prompt}, NOTHING)


@pytest.mark.parametrize(("name", "value"), [("prompt", 3), ("prompt", None), ("system", ["x"])])
def test_a_setting_that_is_not_text_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"environment_config: {name} is .*; it must be text"):
        build_environment("single_turn", {name: value}, NOTHING)


def test_a_placeholder_names_a_key_and_nothing_inside_of_its_value() -> None:
    assert SingleTurn("{a.__class__} {b[0]} {c} {c}").required_inputs() == ("a.__class__", "b[0]", "c")
