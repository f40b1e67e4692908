"""ATIF documents as lines of recorded rollouts."""

import json
from typing import Any

from nat.atif import Trajectory

from rollstream.harness.recorded.lines import Ingested, read_lines
from rollstream.producers.traces.spans import Selection
from rollstream.schemas import tokens
from rollstream.schemas.events.recorded import RecordedRollout, RecordedStep
from rollstream.schemas.tokens import KeptIds, encode_kept

METRICS = {"prompt_token_ids": [5, 6], "completion_token_ids": [7, 8], "logprobs": [-0.5, -0.25]}


def document(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A document as NAT writes it."""
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    found = {"session_id": "s1", "agent": {"name": "coder", "version": "1", "model_name": "tiny"}, "steps": numbered}
    return Trajectory.model_validate(found | more).to_json_dict()


def ingested(*found: dict[str, Any]) -> Ingested:
    return read_lines([json.dumps(one).encode() for one in found], Selection())


def rollouts_of(found: Ingested, group: int = 0) -> list[RecordedRollout]:
    rollouts = [member.rollout for member in found.groups[group].members]
    return [rollout for rollout in rollouts if rollout is not None]


def calls_of(found: Ingested) -> list[RecordedStep]:
    assert len(found.groups) == 1
    (rollout,) = rollouts_of(found)
    return [step for step in rollout.steps if step.event_type == "LLM_END"]


def with_tools() -> dict[str, Any]:
    call = {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2}}
    called = {"source": "agent", "message": "", "tool_calls": [call], "metrics": METRICS}
    called["observation"] = {"results": [{"source_call_id": "c1", "content": "4"}, {"content": "a note"}]}
    answer = {"source": "agent", "message": "4", "extra": {"finish_reason": "length"}}
    prompt = {"source": "system", "message": "Add."}, {"source": "user", "message": "2+2="}
    return document(*prompt, called, answer, extra={"reward": 1.0})


def test_answers_become_calls_with_exact_tokens_and_the_conversation_before_them() -> None:
    found = ingested(with_tools())
    first, last = calls_of(found)
    assert first.tokens is not None
    assert list(tokens.decode_ids(first.tokens.prompt_ids)) == [5, 6]
    assert list(tokens.decode_ids(first.tokens.completion_ids)) == [7, 8]
    assert first.tokens.logprobs is not None
    assert list(tokens.decode_floats(first.tokens.logprobs)) == [-0.5, -0.25]
    assert first.name == "tiny"
    assert last.tokens is None
    assert last.chat is not None
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}
    assert list(last.chat.messages) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "content": "a note"},
    ]
    assert found.untrained == {"no_token_ids": 1}
    (rollout,) = rollouts_of(found)
    assert [(step.name, step.data) for step in rollout.steps if step.event_type == "TOOL_END"] == [
        ("add", {"input": {"a": 2}, "output": "4"}),
        ("tool", {"input": {}, "output": "a note"}),
    ]
    assert [(reward.name, reward.value) for reward in rollout.rewards] == [("reward", 1.0)]


def test_copied_context_and_steps_without_a_call_of_the_model_are_not_calls() -> None:
    shown = {"source": "agent", "message": "shown", "is_copied_context": True}
    fixed = {"source": "agent", "message": "by rule", "llm_call_count": 0}
    found = ingested(document({"source": "user", "message": "?"}, shown, fixed, {"source": "agent", "message": "4"}))
    (call,) = calls_of(found)
    assert call.chat is not None
    assert [one["content"] for one in call.chat.messages] == ["?", "shown", "by rule"]


def test_rollouts_with_the_same_first_message_form_a_group() -> None:
    asked = [{"source": "user", "message": "2+2="}, {"source": "agent", "message": "4", "metrics": METRICS}]
    other = [{"source": "user", "message": "3+3="}, asked[1]]
    named = {"extra": {"example_id": "x", "rewards": {"right": 1.0, "brief": 0.5}}}
    found = ingested(
        document(*asked, session_id="a"),
        document(*asked, session_id="b"),
        document(*other, session_id="c"),
        document(*other, session_id="d", **named),
        {"rollout_id": "a", "reward": 0.5},
    )
    assert not found.bad
    assert [len(group.members) for group in found.groups] == [2, 1, 1]
    assert found.groups[2].example_id == "x"
    assert [reward.value for rollout in rollouts_of(found) for reward in rollout.rewards] == [0.5]
    (rollout,) = rollouts_of(found, 2)
    assert {reward.name: reward.value for reward in rollout.rewards} == {"right": 1.0, "brief": 0.5}


def test_documents_of_one_session_are_one_rollout_and_a_repeated_line_counts_once() -> None:
    steps = {"source": "user", "message": "2+2="}, {"source": "agent", "message": "4", "metrics": METRICS}
    parts = [document(*steps, trajectory_id=name) for name in ("s1/a", "s1/b")]
    assert len(calls_of(ingested(*parts, parts[0]))) == 2


def test_agents_of_a_session_are_rollouts_of_their_own_and_later_documents_ask_nothing_new() -> None:
    asked = {"source": "user", "message": "2+2="}, {"source": "agent", "message": "4", "metrics": METRICS}
    later = {"source": "user", "message": "in short"}, asked[1]
    found = ingested(*(document(*asked, extra={"agent": name, "reward": n}) for n, name in enumerate(("a", "b"))))
    assert [rollout.source_id for rollout in rollouts_of(found)] == ["s1/a", "s1/b"]
    assert not found.bad
    parts = ingested(document(*asked), document(*later))
    assert not parts.bad
    assert [call.chat is not None for call in calls_of(parts)] == [True, True]


def test_tools_reasoning_and_kept_ids_are_read() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    step = {"source": "agent", "message": "4", "reasoning_content": "since", "metrics": METRICS}
    kept = encode_kept(KeptIds(lengths=(2, 1), ids=(7, 9, 8)))
    written = document({"source": "user", "message": "?"}, step | {"extra": {"kept_ids": kept}})
    written["agent"]["tool_definitions"] = [tool]
    (call,) = calls_of(ingested(written))
    assert call.chat is not None
    assert list(call.chat.tools) == [tool]
    assert call.chat.answer["reasoning_content"] == "since"
    assert call.tokens is not None
    assert call.tokens.kept_ids == kept


def test_parts_of_a_message_stay_parts() -> None:
    image = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}
    parts = [{"type": "text", "text": "see", "source": None}, image | {"text": None}]
    written = document({"source": "user", "message": "?"}, {"source": "agent", "message": "4"})
    written["steps"][0]["message"] = parts
    (call,) = calls_of(ingested(written))
    assert call.chat is not None
    assert call.chat.messages[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
    ]


def test_a_document_that_is_not_atif_is_a_bad_line_with_the_place() -> None:
    found = ingested({"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": [{"source": "nobody"}]})
    assert not found.groups
    (bad,) = found.bad
    assert "steps" in bad.reason
    assert "source" in bad.reason
