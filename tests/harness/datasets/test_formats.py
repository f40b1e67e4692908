"""Rows of the formats of other programs, from recorded trajectories."""

import json
from dataclasses import replace
from typing import Any

import pytest
from nat.atif import Trajectory

from rollstream.harness.datasets.atif import atif
from rollstream.harness.datasets.conversations import RecordedTrajectory
from rollstream.harness.datasets.training_rows import RowOptions, Tally, openai_chat, trl_dpo, trl_kto, trl_sft
from rollstream.producers.rollout.scored_answers import CANDIDATE
from rollstream.schemas.events import GroupClosed, StepRecorded, TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.events.training import MemberRef
from rollstream.schemas.tokens import encode_floats, encode_ids

GROUP = "run/rl/e00000/t00000"
USER = {"role": "user", "content": "2+2="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WRITTEN_CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def step(index: int, sent: Any, output: Any, **more: Any) -> StepRecorded:
    fields = {"agent": "agent", "event_type": "LLM_END", "uuid": f"u{index}", "data": {"input": sent, "output": output}}
    return StepRecorded(run_id="run", time_ms=0, group_id=GROUP, rollout_id="r", step_index=index, **(fields | more))


def sequence(*indices: int) -> TokenSequence:
    """A sequence with two prompt tokens and two sampled ones for each call."""
    completions = [Completion(start=4 * n + 2, length=2, step_index=index) for n, index in enumerate(indices)]
    size = len(indices)
    return TokenSequence(
        token_ids=encode_ids(range(4 * size)), logprobs=encode_floats([-0.5] * 2 * size), completions=tuple(completions)
    )


def trajectory(
    reward: float,
    *steps: StepRecorded,
    sequences: tuple[TokenSequence, ...] = (),
    agent: str = "agent",
    member: int = 0,
) -> RecordedTrajectory:
    rollout = f"{GROUP}/m{member}/a0"
    common: dict[str, Any] = {"rollout_id": rollout, "agent": agent, "trajectory_id": f"{rollout}/{agent}"}
    origin: dict[str, Any] = {"run_id": "run", "time_ms": 0, "group_id": GROUP, "example_id": "x", "job_id": "run/rl"}
    assembled = TrajectoryAssembled(
        **common,
        **origin,
        model_group="run/policy",
        member=member,
        attempt=0,
        epoch=0,
        reward=reward,
        rewards={"right": reward},
        sequences=sequences or (sequence(*(one.step_index for one in steps)),),
        num_steps=len(steps),
        steps_digest="",
    )
    counts: dict[str, Any] = {"num_tokens": 4, "num_completion_tokens": 2, "min_version": 3, "max_version": 4}
    ref = MemberRef(**common, member=member, digest="", reward=reward, **counts)
    group = GroupClosed(**origin, epoch=0, index=0, reason="complete", is_viable=True, size=1, members=(ref,))
    return RecordedTrajectory(group, ref, assembled, {one.step_index: one for one in steps})


def answered(reward: float, output: str, member: int = 0, sent: Any = (USER,), **more: Any) -> RecordedTrajectory:
    return trajectory(reward, step(0, [*sent], output, **more), member=member)


def rows(format: Any, *group: RecordedTrajectory, **choice: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    tally = Tally()
    found = list(format(group, RowOptions(**choice), tally))
    json.dumps(found)
    return found, {what: count for what, count in tally.left_out.items() if count}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def with_tools() -> RecordedTrajectory:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    first = step(0, [USER], WRITTEN_CALL, data={"input": [USER], "output": WRITTEN_CALL, "tools": [TOOL]})
    last = step(2, None, "", data={"input": [USER, called, result], "output": "4", "tools": [TOOL]})
    tool = step(1, {"a": 2}, "4", event_type="TOOL_END")
    return trajectory(1.0, first, tool, last, sequences=(sequence(0, 2),))


def test_a_conversation_is_what_was_last_sent_and_answered() -> None:
    turns = [USER, assistant("3"), {"role": "user", "content": "higher"}]
    (row,), left_out = rows(trl_sft, trajectory(1.0, step(0, [USER], "3"), step(1, turns, "4")))
    assert row["messages"] == [*turns, assistant("4")]
    assert (row["reward"], row["rollout_id"], row["min_version"]) == (1.0, f"{GROUP}/m0/a0", 3)
    assert row["tools"] == []
    assert not left_out


def test_sequences_of_one_conversation_are_one_row_and_an_edited_history_is_another() -> None:
    turns = [USER, assistant("3"), {"role": "user", "content": "higher"}]
    steps = step(0, [USER], "3"), step(1, turns, "4"), step(2, [{"role": "user", "content": "in short"}], "5")
    found = trajectory(1.0, *steps, sequences=(sequence(0), sequence(1), sequence(2)))
    messages = [row["messages"] for row in rows(openai_chat, found)[0]]
    assert messages == [[*turns, assistant("4")], [{"role": "user", "content": "in short"}, assistant("5")]]
    (first, _), _ = rows(trl_kto, found, min_reward=0.5)
    assert first["prompt"] == [USER]


def test_arguments_of_calls_are_objects_for_templates_and_texts_for_openai() -> None:
    (row,), _ = rows(trl_sft, with_tools())
    assert row["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert row["tools"] == [TOOL]
    (row,), _ = rows(openai_chat, with_tools())
    assert row["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert row.keys() == {"messages", "tools"}


def test_a_final_answer_with_a_call_has_it_apart() -> None:
    last = answered(1.0, f"so {WRITTEN_CALL}", data={"input": [USER], "output": f"so {WRITTEN_CALL}", "tools": [TOOL]})
    (row,), _ = rows(trl_sft, last)
    message = row["messages"][-1]
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == ("so", {"a": 2})
    (row,), _ = rows(trl_sft, answered(1.0, WRITTEN_CALL))
    assert row["messages"][-1] == assistant(WRITTEN_CALL), "without tools it is text"


def test_a_framework_s_steps_are_read_as_its_messages() -> None:
    start = step(0, {"messages": [USER]}, None, event_type="LLM_START", uuid="u1", framework="langchain")
    end = step(1, "2+2=", "4", framework="langchain")
    (row,), _ = rows(trl_sft, trajectory(1.0, start, end, sequences=(sequence(1),)))
    assert row["messages"] == [USER, assistant("4")]


@pytest.mark.parametrize("more", [{"metadata": {"gateway": {"is_text": True}}}, {"data": {"output": "4"}}])
def test_calls_without_messages_are_left_out_and_counted(more: dict[str, Any]) -> None:
    for format in (trl_sft, trl_dpo, trl_kto, atif):
        assert rows(format, answered(1.0, "4", **more), min_reward=0.0) == ([], {"sequences without chat messages": 1})


def test_the_best_of_a_group_or_all_above_a_reward_are_imitated() -> None:
    group = [answered(reward, str(n), n) for n, reward in enumerate((0.0, 1.0, 1.0, 0.5))]
    found, left_out = rows(openai_chat, *group, is_best_only=True)
    assert [row["messages"][-1]["content"] for row in found] == ["1"]
    assert left_out == {"trajectories not chosen by their reward": 3}
    found, _ = rows(openai_chat, *group, min_reward=0.5)
    assert [row["messages"][-1]["content"] for row in found] == ["1", "2", "3"]
    assert rows(openai_chat, *group, min_reward=2.0, is_best_only=True)[0] == []


def test_a_pair_is_the_best_and_the_worst_answer_to_one_prompt() -> None:
    other = {"role": "user", "content": "3+3="}
    group = [answered(reward, str(n), n) for n, reward in enumerate((0.5, 1.0, 0.0))]
    found, left_out = rows(trl_dpo, *group, answered(0.0, "6", 3, sent=[other]))
    (row,) = found
    assert (row["prompt"], row["chosen"], row["rejected"]) == ([USER], [assistant("1")], [assistant("2")])
    assert (row["score_chosen"], row["score_rejected"]) == (1.0, 0.0)
    assert row["rollout_id_rejected"] == f"{GROUP}/m2/a0"
    assert left_out == {"prompts whose answers are equally good": 1}
    assert rows(trl_dpo, *group, min_reward=2.0)[1] == {"prompts without an answer of the smallest reward": 1}


def test_scored_answers_to_one_prompt_are_a_pair_of_that_turn() -> None:
    turns = [USER, assistant("3"), {"role": "user", "content": "higher"}]
    steps = [step(0, [USER], "3"), step(1, turns, "4"), step(2, turns, "9")]
    found = trajectory(1.0, *steps, sequences=(sequence(0, 1), sequence(2)))
    assembled = found.assembled.model_copy(update={"step_scores": {"1": 0.2, "2": 0.9}})
    (row,), left_out = rows(trl_dpo, replace(found, assembled=assembled))
    assert (row["prompt"], row["chosen"], row["rejected"]) == (turns, [assistant("9")], [assistant("4")])
    assert (row["score_chosen"], row["score_rejected"], left_out) == (0.9, 0.2, {})
    compared = [
        step(n + 3, turns, "", name=CANDIDATE, event_type="TTC_END", metadata={"step_index": n, "is_selected": n == 1})
        for n in (1, 2)
    ]
    (row,), _ = rows(trl_sft, replace(found, steps={**found.steps, **{one.step_index: one for one in compared}}))
    assert row["messages"] == [*turns, assistant("4")]


def test_labels_compare_with_the_mean_of_the_group_or_the_smallest_reward() -> None:
    group = [answered(reward, str(n), n) for n, reward in enumerate((0.0, 1.0, 0.5))]
    found, left_out = rows(trl_kto, *group)
    assert [(row["completion"], row["label"]) for row in found] == [([assistant("0")], False), ([assistant("1")], True)]
    assert left_out == {"trajectories with the mean reward of their group": 1}
    assert [row["label"] for row in rows(trl_kto, *group, min_reward=0.5)[0]] == [False, True, True]


def test_agents_are_compared_with_themselves() -> None:
    group = [trajectory(n / 4, step(0, [USER], str(n)), agent="ab"[n % 2], member=n // 2) for n in range(4)]
    found, _ = rows(openai_chat, *group, is_best_only=True)
    assert [row["messages"][-1]["content"] for row in found] == ["2", "3"]
    assert [(row["agent"], row["score_chosen"]) for row in rows(trl_dpo, *group)[0]] == [("a", 0.5), ("b", 0.75)]


def test_atif_has_the_exact_tokens_and_is_what_nat_reads() -> None:
    (row,), _ = rows(atif, with_tools())
    read = Trajectory.model_validate(row)
    assert [one.source for one in read.steps] == ["user", "agent", "agent"]
    called = row["steps"][1]
    assert called["tool_calls"] == [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2}}]
    assert called["observation"] == {"results": [{"content": "4", "source_call_id": "c1"}]}
    assert called["metrics"]["prompt_token_ids"] == [0, 1]
    assert row["steps"][2]["metrics"]["prompt_token_ids"] == [0, 1, 2, 3, 4, 5]
    assert row["steps"][2]["metrics"]["completion_token_ids"] == [6, 7]
    assert row["steps"][2]["metrics"]["logprobs"] == [-0.5, -0.5]
    assert row["final_metrics"] == {"total_prompt_tokens": 8, "total_completion_tokens": 4, "total_steps": 3}
    assert row["extra"]["rewards"] == {"right": 1.0}


def test_atif_takes_any_message() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    sent = [
        {"role": "developer", "content": None},
        {"role": "tool", "content": "no call before"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image, {"type": "audio"}]},
        {"role": "assistant", "content": "shown", "reasoning_content": "since", "tool_calls": ["odd", {"name": 3}]},
        {"role": "tool", "content": "r", "tool_call_id": "unknown"},
        {"role": "critic", "content": "go on"},
    ]
    (row,), _ = rows(atif, answered(1.0, "4", sent=sent))
    read = Trajectory.model_validate(row)
    assert [one.source for one in read.steps] == ["system", "user", "user", "agent", "user", "agent"]
    assert [part["type"] for part in row["steps"][2]["message"]] == ["text", "image", "text"]
    assert row["steps"][3]["is_copied_context"] is True
    assert "is_copied_context" not in row["steps"][5]


def test_sequences_of_a_rollout_are_documents_of_one_session() -> None:
    steps = step(0, [USER], "3"), step(1, [{"role": "user", "content": "in short"}], "5")
    found, _ = rows(atif, trajectory(1.0, *steps, sequences=(sequence(0), sequence(1))))
    assert [row["trajectory_id"] for row in found] == [f"{GROUP}/m0/a0/agent", f"{GROUP}/m0/a0/agent/1"]
    assert len({row["session_id"] for row in found}) == 1


@pytest.mark.parametrize("arguments", ['{"a": 100000000000000000000}', '{"a": ' + "[" * 300 + "]" * 300 + "}", "{a"])
def test_arguments_that_cannot_be_written_again_stay_text(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    sent = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "?"}]
    (row,), _ = rows(trl_sft, answered(1.0, "4", sent=sent))
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments
    (document,), _ = rows(atif, answered(1.0, "4", sent=sent))
    assert document["steps"][1]["tool_calls"][0]["arguments"] == {"arguments": arguments}


def test_an_ingested_answer_keeps_the_call_of_its_response_and_its_tools() -> None:
    response = {"choices": [{"message": {"role": "assistant", "content": "", "tool_calls": [CALL]}}]}
    data = {"input": {"messages": [USER]}, "output": "", "payload": response}
    (row,), _ = rows(openai_chat, answered(1.0, "", data=data, metadata={"tools_schema": [TOOL]}))
    assert row["messages"] == [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert row["tools"] == [TOOL]


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_a_group_of_equal_rewards_has_no_labels(reward: float) -> None:
    assert rows(trl_kto, *(answered(reward, str(n), n) for n in range(8)))[0] == []


def test_a_pair_needs_two_answers_and_a_score_is_compared_with_scores_alone() -> None:
    same = {"prompts whose best and worst answers are the same": 1}
    assert rows(trl_dpo, answered(0.0, "4", 0), answered(1.0, "4", 1)) == ([], same)
    scored = answered(1.0, "9", 1)
    scored = replace(scored, assembled=scored.assembled.model_copy(update={"step_scores": {"0": 5.0}}))
    assert rows(trl_dpo, answered(0.0, "4", 0), scored)[0] == []


def test_an_answer_that_the_model_was_shown_has_no_weight_for_openai() -> None:
    shown = [{"role": "user", "content": "1+1="}, assistant("2"), USER]
    (row,), _ = rows(openai_chat, answered(1.0, "4", sent=shown))
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]
