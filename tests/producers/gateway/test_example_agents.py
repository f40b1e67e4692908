"""The example agents, as their processes play them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rollstream.schemas import tokens
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import play_outside

AGENTS = Path(__file__).parents[3] / "examples/agents"
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
