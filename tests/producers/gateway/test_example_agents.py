"""The example agents, as their processes play them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.agents import shop
from rollstream.schemas import tokens
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import play_outside, shop_player

AGENTS = Path(__file__).parents[3] / "examples/agents"
TASK = {"question": "What is all bread in stock worth?", "answer": 140}
QUERY = (
    '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT stock, price FROM items WHERE name = \'bread\'"}}\n'
)
CALCULATE = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "35 * 4"}}\n'
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"a": 3, "operator": "+", "b": 4}}\n</tool_call>'


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_an_agent_in_node_calls_its_tool_and_is_rewarded(tmp_path):
    played = play_outside(
        tmp_path,
        environment=f"command:node {AGENTS / 'calculator.mjs'}",
        script=answers(CALL, "7"),
        inputs={"question": "3+4=?", "answer": 7},
        sampling={"max_new_tokens": 200},
        rollout_timeout_s=60.0,
    )
    played.assert_complete()
    steps: list[Any] = played.steps
    first, second = steps
    assert [reward.value for reward in played.rewards] == [1.0]
    assert [message["role"] for message in second.data["input"]] == ["user", "assistant", "tool"]
    whole = tokens.decode_ids(first.llm.prompt_ids) + tokens.decode_ids(first.llm.completion_ids)
    assert second.llm.prefix.length == len(whole)


def test_an_agent_with_openais_client_asks_a_database_and_a_calculator(tmp_path):
    played = play_outside(
        tmp_path,
        program=shop_player,
        script=answers(f"{QUERY}</tool_call>", f"{CALCULATE}</tool_call>", "140"),
        inputs=TASK,
        sampling={"max_new_tokens": 200},
    )
    played.assert_complete()
    steps: list[Any] = played.steps
    *_, last = [step for step in steps if step.llm is not None]
    tool_results = [message["content"] for message in last.data["input"] if message["role"] == "tool"]
    assert tool_results == ["[[35, 4]]", "140"]
    assert [reward.value for reward in played.rewards] == [1.0]


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("calculate", {"expression": "-(2 + 3) * 4 / 8"}, "-2.5"),
        ("calculate", {"expression": "9 ** 9 ** 9"}, "error: ValueError: only numbers"),
        ("calculate", {"expression": "__import__('os')"}, "error: ValueError: only numbers"),
        ("calculate", {"expression": "1 / 0"}, "error: ZeroDivisionError"),
        ("calculate", {"expression": "(" * 150}, "error: "),
        ("calculate", {"number": 3}, "error: TypeError"),
        ("query", {"sql": "SELECT sum(stock) FROM items"}, "[[313]]"),
        ("query", {"sql": "DROP TABLE items"}, "error: DatabaseError: not authorized"),
        ("query", {"sql": "ATTACH '/tmp/x' AS x"}, "error: DatabaseError: not authorized"),
        ("query", {"sql": "SELECT load_extension('x')"}, "error: OperationalError: not authorized"),
        ("query", {"sql": f"SELECT count(*) FROM {', '.join(f'items i{n}' for n in range(12))}"}, "error: Operational"),
        ("erase", {}, "error: KeyError"),
    ],
)
def test_the_tools_answer_what_they_may_and_errors_for_the_rest(name: str, arguments: Any, answer: str) -> None:
    assert shop.use(name, json.dumps(arguments)).startswith(answer)


def test_a_number_is_worth_a_little_and_the_right_one_all() -> None:
    rewards = {"140": 1.0, " 140.0\n": 1.0, "141": 0.1, "": 0.0, "140 or so": 0.0}
    assert {text: shop.reward_of(text, 140.0) for text in rewards} == rewards


def test_a_conversation_without_room_for_an_answer_ends_with_a_reward_and_not_as_a_failure(tmp_path):
    script, sampling = answers(f"{QUERY}</tool_call>"), {"max_new_tokens": 200}
    played = play_outside(tmp_path, program=shop_player, script=script, inputs=TASK, sampling=sampling, max_length=300)
    played.assert_complete()
    assert [reward.value for reward in played.rewards] == [0.0]


def test_a_task_may_have_a_table_of_its_own_which_the_model_cannot_replace() -> None:
    items = [["bread", 2, 7]]
    assert shop.use("query", json.dumps({"sql": "SELECT name, price FROM items"}), items) == '[["bread", 2]]'
    replaced = json.dumps({"sql": "SELECT 1", "items": []})
    assert shop.use("query", replaced, items).startswith("error: TypeError")
