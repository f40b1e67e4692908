"""NAT's step schema: what an installed NAT dumps comes out as it went in, and what NAT refuses is refused."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollstream.producers.traces.spans import Selection, recorded_steps
from rollstream.schemas import tokens
from rollstream.schemas.events.intermediate_steps import (
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepState,
    IntermediateStepType,
)

NODE = {"function_id": "f", "function_name": "<workflow>", "parent_id": None, "parent_name": None}


def step(**payload):
    return {"parent_id": "root", "function_ancestry": NODE, "payload": {"event_type": "LLM_END", "UUID": "u"} | payload}


@pytest.fixture(scope="module")
def dumped():
    """Lines of the installed NAT."""
    if importlib.util.find_spec("nat") is None:
        pytest.skip("needs nvidia-nat-core")
    script = Path(__file__).parent / "dump_nat_steps.py"
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_dump_of_an_installed_nat_survives_a_round_trip(dumped):
    kinds = set()
    for line in dumped:
        read = IntermediateStep.model_validate_json(line)
        assert json.loads(read.model_dump_json()) == json.loads(line)
        kinds.add(read.payload.event_type)
    assert kinds == set(IntermediateStepType)
    assert len(kinds) == 18


@pytest.mark.slow
def test_a_langchain_agents_run_of_an_installed_nat_is_read_call_by_call(dumped):
    steps = [IntermediateStep.model_validate_json(line) for line in dumped[36:]]
    recorded = recorded_steps(steps, Selection())
    first, tool, later = recorded[:3]
    assert [step.event_type for step in recorded] == [
        *("LLM_END", "TOOL_END", "LLM_END"),
        *("FUNCTION_END", "FUNCTION_END", "WORKFLOW_END"),
    ]
    assert first.chat is not None
    assert later.chat is not None
    assert later.tokens is not None
    assert first.chat.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert first.chat.answer == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert later.chat.messages[2:] == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    )
    assert later.chat.answer == {"role": "assistant", "content": "4"}
    assert list(tokens.decode_ids(later.tokens.prompt_ids)) == [5, 6, 7, 8]
    assert later.tokens.spans[0].version == 3
    assert tool.tokens is None
    assert tool.data is not None
    output = tool.data["output"]
    assert isinstance(output, dict)
    assert output["content"] == "2"
    assert {step.untrained for step in recorded} == {None}


def test_every_type_has_its_category_and_state():
    for kind in IntermediateStepType:
        payload = IntermediateStepPayload(event_type=kind)
        assert kind.value.startswith(payload.event_category.value)
        assert payload.event_category in IntermediateStepCategory
    states = {kind: IntermediateStepPayload(event_type=kind).event_state for kind in IntermediateStepType}
    assert states[IntermediateStepType.LLM_NEW_TOKEN] == IntermediateStepState.CHUNK
    assert states[IntermediateStepType.SPAN_CHUNK] == IntermediateStepState.CHUNK
    assert sum(state == IntermediateStepState.END for state in states.values()) == 8


@pytest.mark.parametrize(
    ("broken", "location"),
    [
        (step() | {"extra": 1}, "extra"),
        (step(event_type="LLM_STOP"), "payload.event_type"),
        (step(framework="unknown"), "payload.framework"),
        (step(event_type="LLM_START", span_event_timestamp=1.0), "payload"),
        (step(event_type="SPAN_CHUNK", span_event_timestamp=1.0), "payload"),
        ({"payload": {"event_type": "LLM_END"}}, "parent_id"),
    ],
)
def test_steps_that_nat_refuses_are_refused(broken, location):
    with pytest.raises(ValidationError) as caught:
        IntermediateStep.model_validate(broken)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]) == location


def test_extra_keys_stay_where_nat_lets_them_stand():
    given = step(own=1, data={"input": 1, "score": 0.5}, metadata={"free": [1]}, span_event_timestamp=1.0)
    read = IntermediateStep.model_validate(given)
    content = json.loads(read.model_dump_json())
    assert content["payload"]["own"] == 1
    assert content["payload"]["data"]["score"] == 0.5
    assert content["payload"]["metadata"] == {"free": [1]}
    assert IntermediateStep.model_validate(content) == read
