"""Answers that look alike to a client: each comes back into a prompt as the text that the model wrote for it."""

from typing import Any

import pytest

from rollstream.producers.rollout.registry import register_environment
from tests.producers.conftest import answers, task_of
from tests.producers.gateway.gateway_rig import Killed, play_outside
from tests.rigs.families import qwen3_tokenizer

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
LONG: Any = {"sampling": {"max_new_tokens": 400}}
QUESTION = {"role": "user", "content": "3+1"}


def after(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation after a message that calls one tool."""
    (call,) = message["tool_calls"]
    return [QUESTION, message, {"role": "tool", "tool_call_id": call["id"], "content": "4"}]


def llm_calls(played: Any) -> list[Any]:
    """Recorded calls with the indexes of their steps."""
    return [(step.step_index, step.llm) for step in played.steps if step.llm is not None]


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("is_killed", [False, True])
def test_equal_calls_of_two_choices_have_ids_of_their_own_and_a_prompt_goes_on_from_the_one_that_was_chosen(
    tmp_path, chosen, is_killed
):
    found: list[Any] = []

    async def first(one: Any) -> None:
        asked = {"tools": [TOOL], "n": 2, "headers": {"Idempotency-Key": "k"}}
        found.append([choice["message"] for choice in (await one.chat(QUESTION, **asked))["choices"]])
        if is_killed and len(found) == 1:
            raise Killed
        await one.chat(*after(found[0][chosen]), tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, first, script=answers(f"A\n{CALL}", f"A {CALL}", "four"), **LONG)
    if is_killed:
        played = play_outside(tmp_path, first, script=answers("four"), before=played, **LONG)
        assert found[0] == found[1]
    played.assert_complete()
    assert [one["content"] for one in found[0]] == ["A", "A"]
    assert found[0][0]["tool_calls"][0]["id"] != found[0][1]["tool_calls"][0]["id"]
    *choices, (_, last) = llm_calls(played)
    assert last.prefix.step_index == choices[chosen][0]


def test_equal_calls_of_a_repeated_chat_have_ids_of_their_own(play):
    found: list[Any] = []

    @register_environment("test_equal_calls")
    async def equal_calls(session):
        replies = [await session.chat([QUESTION], tools=[TOOL]) for _ in range(2)]
        found.extend(reply.tool_calls[0]["id"] for reply in replies)
        await session.chat(after(replies[0].message), tools=[TOOL])
        await session.reward(1.0)

    played = play(task_of("test_equal_calls", **LONG), answers(f"A\n{CALL}", f"A {CALL}", "four"))
    played.assert_complete()
    assert found[0] != found[1]
    (first, _), _, (_, last) = llm_calls(played)
    assert last.prefix.step_index == first


@pytest.mark.parametrize("is_killed", [False, True])
def test_of_two_turns_with_one_answer_each_keeps_its_own_reasoning(tmp_path, is_killed):
    tokenizer = qwen3_tokenizer(tmp_path / "model")
    plain = [f"<think>\n{thought}\n</think>\n\nyes" for thought in ("three", "four")]
    times: list[int] = []

    async def agent(one: Any) -> None:
        times.append(1)
        sent: list[Any] = [QUESTION]
        for number in range(3):
            key = {"Idempotency-Key": f"k{number}"}
            message = (await one.chat(*sent, tools=[TOOL], headers=key))["choices"][0]["message"]
            message.pop("reasoning_content", None)
            sent += [message, {"role": "user", "content": f"again {number}"}]
            if is_killed and number == 1 and len(times) == 1:
                raise Killed
        await one.reward(1.0)
        await one.end()

    options: dict[str, Any] = {"tokenizer": tokenizer, **LONG}
    played = play_outside(tmp_path, agent, script=answers(*plain, "end"), **options)
    if is_killed:
        played = play_outside(tmp_path, agent, script=answers("end"), before=played, **options)
    played.assert_complete()
    last: Any = [step for step in played.steps if step.llm is not None][-1]
    texts = [one["content"] for one in last.data["input"] if one["role"] == "assistant"]
    assert texts == plain
