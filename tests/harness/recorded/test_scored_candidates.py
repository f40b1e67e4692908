"""Scored candidates to preference pairs: what a step may look like, what makes a pair and what is dropped why."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.harness.recorded.from_trajectories import (
    CHOSEN,
    REJECTED,
    rollouts_of_items,
    score_diff_of,
    tokens_of,
    trajectory_of,
)
from rollstream.harness.recorded.pairs import Found, PairSelection, ScoredCandidate, candidates_of, select_pairs
from rollstream.schemas import tokens
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.events.intermediate_steps import IntermediateStep
from rollstream.schemas.finetuning import DPOItem, OpenAIMessage, Trajectory

NAME = "dpo_candidate_move"
PROMPT = [{"role": "user", "content": "012345678"}]


def step(index: int, output: str, score: Any, **changes: Any) -> dict[str, Any]:
    """A candidate's last step, as NAT writes it to JSON."""
    data = {"input": PROMPT, "output": output, "chunk": None, "payload": None}
    data |= {"turn_id": "turn_0_ab", "turn_index": 0, "candidate_index": index, "score": score}
    payload = {"event_type": "TTC_END", "event_timestamp": 1.0, "span_event_timestamp": 0.5, "name": NAME}
    payload |= {"UUID": f"u{index}", "framework": None, "tags": None, "usage_info": None}
    payload |= {"metadata": {"is_selected": index == 0}, "data": data | changes.pop("data", {})}
    ancestry = {"function_id": "f", "function_name": "<workflow>", "parent_id": None, "parent_name": None}
    return {"parent_id": "root", "function_ancestry": ancestry, "payload": payload | changes}


def found(*steps: Any, **known: Any) -> Found:
    return candidates_of(steps, name=NAME, example_id="x1", **known)


def pairs(*steps: Any, **selection: Any) -> list[tuple[str, str, float]]:
    selected = select_pairs(found(*steps).candidates, PairSelection(**selection))
    return [(pair.chosen.response, pair.rejected.response, pair.score_diff) for pair in selected.pairs]


def dropped(*steps: Any, **selection: Any) -> dict[str, int]:
    read = found(*steps)
    return dict(read.dropped + select_pairs(read.candidates, PairSelection(**selection)).dropped)


def test_every_better_and_worse_candidate_is_a_pair_or_only_the_best_and_the_worst() -> None:
    steps = [step(0, "4", 0.0), step(1, "2", 1.0), step(2, "8", -1.0)]
    assert pairs(*steps) == [("2", "8", 2.0), ("4", "8", 1.0), ("2", "4", 1.0)]
    assert pairs(*steps, exhaustive_pairs=False) == [("2", "8", 2.0)]
    assert pairs(*steps, max_pairs_per_turn=1) == [("2", "8", 2.0)]
    assert pairs(*steps, min_score_diff=1.5) == [("2", "8", 2.0)]


def test_equal_scores_equal_texts_and_other_prompts_are_dropped_and_counted() -> None:
    other = {"data": {"input": [{"role": "user", "content": "X12345678"}]}}
    assert dropped(step(0, "4", 1.0), step(1, "2", 1.0)) == {"equal scores": 1}
    assert dropped(step(0, "4", 1.0), step(1, "4", 0.0)) == {"equal texts": 1}
    assert dropped(step(0, "4", 1.0), step(1, "2", 0.0, **other)) == {"different prompts": 1}
    assert dropped(step(0, "4", 1.0), step(1, "2", 0.9), min_score_diff=0.5) == {"less than min_score_diff": 1}
    assert dropped(step(0, "4", 1.0)) == {"the only candidate of its turn": 1}
    assert dropped(step(0, "4", 1.0), require_multiple_candidates=False) == {}
    three = [step(0, "4", 0.0), step(1, "2", 1.0), step(2, "8", -1.0)]
    assert dropped(*three, max_pairs_per_turn=1) == {"more than max_pairs_per_turn": 2}


def test_prompts_that_are_equal_as_text_and_differ_in_tokens_are_not_compared() -> None:
    steps = [step(0, "4", 1.0, metadata={"step_index": 3}), step(1, "2", 0.0, metadata={"step_index": 5})]
    prompts = {3: {"prompt_token_ids": [1, 2]}, 5: {"prompt_token_ids": [1, 3]}}
    assert select_pairs(found(*steps, tokens=prompts).candidates, PairSelection()).dropped == {"different prompts": 1}
    prompts[5] = prompts[3]
    assert len(select_pairs(found(*steps, tokens=prompts).candidates, PairSelection()).pairs) == 1


@pytest.mark.parametrize("changes", [{"turn_id": None}, {"score": None}, {"score": True}, {"score": float("nan")}])
def test_a_candidate_without_turn_or_score_is_dropped(changes: dict[str, Any]) -> None:
    assert dropped(step(0, "4", 1.0, data=changes)) == {"without turn_id or score": 1}


def test_a_step_is_read_as_an_object_as_json_and_as_an_event_of_the_log() -> None:
    content = step(1, "4", 1.0)
    payload = content["payload"]
    event = StepRecorded(
        run_id="r",
        time_ms=1,
        group_id="r/g",
        rollout_id="r/g/m0/a0",
        step_index=7,
        agent="agent",
        event_type="TTC_END",
        uuid="u",
        name=NAME,
        data=payload["data"],
        metadata=payload["metadata"],
    )
    parsed = IntermediateStep.model_validate(content)
    read = [found(one).candidates[0] for one in (content, payload, parsed, parsed.payload)]
    assert all(one == read[0] for one in read)
    (of_log,) = found(event).candidates
    assert (of_log.prompt, of_log.response, of_log.score) == (read[0].prompt, read[0].response, read[0].score)
    assert of_log.reference["step_index"] == 7


def test_other_steps_and_invalid_steps_are_skipped() -> None:
    start = step(0, "4", 1.0, event_type="TTC_START", span_event_timestamp=None)
    assert found(start, step(0, "4", 1.0, name="other"), {"event_type": "?"}, 3, None) == Found()


def test_a_candidate_that_writes_a_template_of_tool_calls_keeps_its_text() -> None:
    text = 'as in:\n\nTool calls: {{"name": "search", "arguments": {{"q": "x"}}}}'
    (one,) = found(step(0, text, 1.0)).candidates
    assert one.response == text


def test_a_prompt_has_not_the_answer_at_its_end_and_may_be_one_text() -> None:
    messages = [*PROMPT, {"role": "assistant", "content": "4"}]
    (one,) = found(step(0, "4", 1.0, data={"input": messages})).candidates
    assert one.prompt == (("user", "012345678"),)
    (one,) = found(step(0, "4", 1.0, data={"input": "what now?"})).candidates
    assert one.prompt == "what now?"
    (one,) = found(step(0, "4", 1.0, data={"input": [{"type": "human", "content": "hi"}]})).candidates
    assert one.prompt == (("user", "hi"),)
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    assert dropped(step(0, "4", 1.0, data={"input": picture})) == {"without a prompt of texts": 1}


def test_turns_of_different_rollouts_are_not_mixed() -> None:
    first = found(step(0, "4", 1.0), rollout_id="m0").candidates
    second = found(step(1, "2", 0.0), rollout_id="m1").candidates
    assert select_pairs([*first, *second], PairSelection()).pairs == []


@given(st.lists(st.tuples(st.sampled_from("0123"), st.sampled_from([0.0, 0.5, 1.0])), max_size=8), st.randoms())
def test_no_order_of_the_candidates_changes_the_pairs(answers: list[tuple[str, float]], rng: random.Random) -> None:
    candidates = [
        ScoredCandidate("x", "m0", "turn", 0, index, (("user", "?"),), text, score)
        for index, (text, score) in enumerate(answers)
    ]
    selected = select_pairs(candidates, PairSelection(max_pairs_per_turn=5)).pairs
    rng.shuffle(candidates)
    assert select_pairs(candidates, PairSelection(max_pairs_per_turn=5)).pairs == selected
    assert all(p.score_diff > 0 and p.chosen.response != p.rejected.response for p in selected)


# ---- as trajectories ----

EXACT = {
    3: {"prompt_token_ids": [1, 2], "token_ids": [7, 0], "logprobs": [-0.5, -0.25], "spans": []},
    5: {"prompt_token_ids": [1, 2], "token_ids": [8, 0], "logprobs": [-1.5, -0.25], "spans": []},
}


def trajectory(*, reward_from_score_diff: bool = True) -> Trajectory:
    steps = [step(0, "4", 1.0, metadata={"step_index": 3}), step(1, "2", 0.75, metadata={"step_index": 5})]
    (pair,) = select_pairs(found(*steps, rollout_id="m0", tokens=EXACT).candidates, PairSelection()).pairs
    return trajectory_of(pair, reward_from_score_diff=reward_from_score_diff, metadata={"run_id": "r", "epoch": 2})


def test_a_pair_is_a_trajectory_of_one_item_with_nats_metadata() -> None:
    made = trajectory()
    assert made.episode == [
        DPOItem(prompt=[OpenAIMessage(role="user", content="012345678")], chosen_response="4", rejected_response="2")
    ]
    assert (made.reward, trajectory(reward_from_score_diff=False).reward) == (0.25, 1.0)
    metadata = made.metadata or {}
    reported = {key: value for key, value in metadata.items() if key != "references"}
    assert reported == {
        "run_id": "r",
        "epoch": 2,
        "dpo_type": "preference_pair",
        "id": "x1",
        "example_id": "x1",
        "turn_id": "turn_0_ab",
        "turn_index": 0,
        "score_diff": 0.25,
        "chosen_score": 1.0,
        "rejected_score": 0.75,
        "chosen_index": 0,
        "rejected_index": 1,
    }
    assert metadata["references"][CHOSEN]["rollout_id"] == "m0"
    assert metadata["references"][REJECTED]["step_index"] == 5


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_submitted_pair_has_the_exact_tokens_of_both_answers(is_read_again: bool) -> None:
    made = trajectory(reward_from_score_diff=False)
    if is_read_again:
        made = Trajectory.model_validate_json(made.model_dump_json())
    ((chosen, rejected),) = rollouts_of_items(made)
    for rollout, ids in ((chosen, [7, 0]), (rejected, [8, 0])):
        exact = rollout.steps[0].tokens
        assert exact is not None
        assert tokens.decode_ids(exact.prompt_ids).tolist() == [1, 2]
        assert tokens.decode_ids(exact.completion_ids).tolist() == ids
    scores = [[(r.value, r.step, r.is_score) for r in rollout.rewards] for rollout in (chosen, rejected)]
    assert scores == [[(0.25, None, False), (0.25, 0, True)], [(0.0, None, False), (0.0, 0, True)]]


def test_tokens_of_a_text_that_was_changed_are_not_used() -> None:
    made = trajectory()
    (item,) = made.episode
    assert isinstance(item, DPOItem)
    assert tokens_of(made, item, CHOSEN) is not None
    for change in ({"chosen_response": "5"}, {"prompt": "another"}):
        assert tokens_of(made, item.model_copy(update=change), CHOSEN) is None
    assert tokens_of(made, item.model_copy(update={"chosen_response": "5"}), REJECTED) is not None
    assert tokens_of(Trajectory(episode=[item], reward=1.0), item, CHOSEN) is None


@pytest.mark.parametrize(
    ("reward", "metadata", "diff"), [(2.0, None, 2.0), (-1.0, {}, 1.0), (3.0, {"score_diff": 0.5}, 0.5)]
)
def test_the_score_difference_is_the_given_one_or_else_the_reward(
    reward: float, metadata: dict[str, Any] | None, diff: float
) -> None:
    item = DPOItem(prompt="?", chosen_response="a", rejected_response="b")
    assert score_diff_of(Trajectory(episode=[item], reward=reward, metadata=metadata)) == diff
