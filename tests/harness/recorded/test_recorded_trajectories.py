"""Trajectories of other builders as recorded rollouts: shapes of log-probabilities, pairs, what cannot be used."""

from types import SimpleNamespace

import numpy as np
import pytest

from rollstream.harness.components.interfaces import score_of
from rollstream.harness.components.trajectories import _by_message, _episode, completions_of
from rollstream.harness.recorded.from_trajectories import rollout_of, rollouts_of_items, rollouts_of_pair, weights_of
from rollstream.producers.traces.framework_logprobs import read_logprobs
from rollstream.schemas import tokens
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.events.recorded import RecordedChat, RecordedRollout, RecordedStep
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.finetuning import DPOItem, EpisodeItem, OpenAIMessage, Trajectory
from rollstream.schemas.settings import OTHERS

CONTENT = [{"token": "a", "logprob": -0.5, "top_logprobs": []}, {"token": "b", "logprob": -0.25, "top_logprobs": []}]
OURS = {"prompt_token_ids": [5, 6], "token_ids": [7, 8], "model_group": "run/policy", "version": 3}


def item(role, content, logprobs=None, **metadata):
    return EpisodeItem(role=role, content=content, logprobs=logprobs, metadata=metadata or None)


def trajectory(*items, reward=1.0, shaped=None, **metadata):
    return Trajectory(episode=list(items), reward=reward, shaped_rewards=shaped, metadata=metadata or None)


def chat_of(step: RecordedStep) -> RecordedChat:
    assert step.chat is not None
    return step.chat


def as_object(value):
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_object(part) for key, part in value.items()})
    return [as_object(part) for part in value] if isinstance(value, list) else value


SHAPES = {
    "a dict of ids beside the entries": ({"content": CONTENT, **OURS}, True, True),
    "an object of them": (as_object({"content": CONTENT, **OURS}), True, True),
    "entries without ids": ({"content": CONTENT, "refusal": None}, True, False),
    "an object of entries without ids": (as_object({"content": CONTENT}), True, False),
    "a list of numbers": ([-0.5, -0.25], True, False),
    "a list of entries": (CONTENT, True, False),
    "ids in the tokens": (
        {"prompt_token_ids": [5, 6], "content": [{"token": f"token_id:{n}", "logprob": -0.5} for n in (7, 8)]},
        True,
        True,
    ),
    "ids and numbers": ({"prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-0.5, -0.5]}, True, True),
    "ids alone": ({"prompt_token_ids": [5, 6], "token_ids": [7, 8]}, False, True),
    "completion ids alone": ({"token_ids": [7, 8], "content": CONTENT}, True, False),
    "nothing": ({}, False, False),
    "no number": ({"content": [{"token": "a", "logprob": None}]}, False, False),
    "a text": ("logprobs", False, False),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_are_read_in_every_shape(shape):
    raw, has_values, is_exact = SHAPES[shape]
    found = read_logprobs(raw)
    assert (found.values is not None) == has_values
    exact = found.tokens()
    assert (exact is not None) == is_exact
    if exact:
        assert list(tokens.decode_ids(exact.prompt_ids)) == [5, 6]
        assert list(tokens.decode_ids(exact.completion_ids)) == [7, 8]
        assert (exact.logprobs is not None) == has_values


def test_the_version_in_an_endpoints_answer_becomes_its_span():
    exact = read_logprobs({"content": CONTENT, **OURS}).tokens()
    assert exact is not None
    assert [(span.model_group, span.version, span.length) for span in exact.spans] == [("run/policy", 3, 2)]


def test_log_probabilities_that_do_not_fit_the_ids_are_left_out():
    exact = read_logprobs({"prompt_token_ids": [5], "token_ids": [7, 8, 9], "content": CONTENT}).tokens()
    assert exact is not None
    assert exact.logprobs is None


def test_every_answer_is_one_call_with_the_messages_before_it_as_its_prompt():
    tool_calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    rollout = rollout_of(
        trajectory(
            item("system", "be brief"),
            item("user", "1+1"),
            item("assistant", "", {"content": CONTENT, **OURS}, tool_calls=tool_calls),
            item("tool", "2", tool_call_id="c1"),
            item("environment", "go on"),
            item("assistant", "2", [-0.5]),
            shaped=[0.25, 0.5],
            id="x1",
            generation=2,
        )
    )
    first, second = rollout.steps
    assert rollout.source_id == "x1/2"
    assert [message["role"] for message in chat_of(first).messages] == ["system", "user"]
    assert chat_of(first).answer["tool_calls"] == tool_calls
    assert first.tokens is not None
    assert [message["role"] for message in chat_of(second).messages] == ["system", "user", "assistant", "tool", "user"]
    assert chat_of(second).messages[3] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert second.tokens is None
    assert [(r.name, r.value, r.step) for r in rollout.rewards] == [
        ("reward", 0.25, None),
        ("shaped_reward", 0.25, 0),
        ("shaped_reward", 0.5, 1),
    ]
    assert sum(reward.value for reward in rollout.rewards) == 1.0


def test_an_answer_without_log_probabilities_is_record_only_unless_they_are_not_demanded():
    answer = trajectory(item("user", "q"), item("assistant", "a", {}))
    assert rollout_of(answer).steps[0].untrained == "no_logprobs"
    assert rollout_of(answer, demands_logprobs=False).steps[0].untrained is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (trajectory(item("user", "q")), "has no assistant message"),
        (trajectory(item("user", "q"), item("assistant", "a", [-1.0]), reward=float("nan")), "its reward is nan"),
        (trajectory(item("assistant", "a", [-1.0]), shaped=[1.0, 2.0]), "2 shaped_rewards for 1 assistant messages"),
        (
            trajectory(item("assistant", "a", [-1.0]), shaped=[float("nan")]),
            "its shaped_rewards are [nan]; expected fin",
        ),
        (trajectory(DPOItem(prompt="p", chosen_response="a", rejected_response="b")), "is a preference pair"),
    ],
)
def test_an_unusable_trajectory_is_a_rollout_with_an_error(broken, message):
    assert message in rollout_of(broken).error


def test_a_preference_pair_is_a_group_of_two_with_one_prompt():
    pair = DPOItem(prompt=[OpenAIMessage(role="user", content="q")], chosen_response="good", rejected_response="bad")
    chosen, rejected = rollouts_of_pair(pair, score_diff=0.5)
    chats = [chat_of(member.steps[0]) for member in (chosen, rejected)]
    assert [chat.messages for chat in chats] == [({"role": "user", "content": "q"},)] * 2
    assert [chat.answer["content"] for chat in chats] == ["good", "bad"]
    assert [r.rewards[0].value for r in (chosen, rejected)] == [0.5, 0.0]
    text = DPOItem(prompt="q", chosen_response="good", rejected_response="bad")
    assert chat_of(rollouts_of_pair(text)[0].steps[0]).messages == chats[0].messages
    [(first, second)] = rollouts_of_items(trajectory(pair, reward=0.0))
    assert (first.rewards[0].value, second.rewards[0].value) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (np.float32(0.5), 0.5), (np.int64(1), 1.0), (0.25, 0.25), (np.bool_(True), None), (True, None), ("1", None),
        (10**400, None), (np.float64("nan"), None), (None, None),
    ],
)  # fmt: skip
def test_numpy_scores_count_and_a_score_that_is_not_finite_is_missing(score, expected):
    assert score_of(SimpleNamespace(score=score, error=None)) == expected


def test_step_rewards_are_0_for_answers_of_the_prompt_and_a_changed_trajectory_can_be_used():
    prompt = [{"role": role, "content": text} for role, text in (("user", "2"), ("assistant", "2"), ("user", "3"))]
    base = {"run_id": "r", "time_ms": 0, "group_id": "r/g", "rollout_id": "r/g/m0/a0", "agent": "a"}
    call = StepRecorded(**base, step_index=4, event_type="LLM_END", uuid="u", data={"input": prompt, "output": "3"})
    episode = _episode([call], {4: {"content": CONTENT, **OURS}})
    shaped = _by_message([0.5], episode)
    assert shaped == [0.0, 0.5]
    assert _by_message(None, episode) is None
    found = rollout_of(Trajectory(episode=episode, reward=0.5, shaped_rewards=shaped), demands_logprobs=False)
    assert found.error is None


KEPT = tokens.encode_kept(tokens.KeptIds((2, 2), (7, 9, 6, 8)))


def cut_off(kept_ids: str | None = KEPT):
    """Token data of a call that was cut off, sampled under top_k, as our builder's messages have it."""
    part = Completion(start=2, length=2, step_index=0, finish_reason="length", kept_ids=kept_ids)
    ids, values = tokens.encode_ids([5, 6, 7, 8]), tokens.encode_floats([-0.5, -0.25])
    return completions_of([TokenSequence(token_ids=ids, logprobs=values, completions=(part,))])[0]


def test_an_answers_kept_ids_and_finish_reason_are_those_of_its_recorded_call():
    (step,) = rollout_of(trajectory(item("user", "q"), item("assistant", "a", cut_off()))).steps
    assert step.tokens is not None
    assert (step.tokens.kept_ids, step.tokens.finish_reason) == (KEPT, "length")
    assert "kept_ids" not in cut_off(None)


@pytest.mark.parametrize("kept_ids", ["?", tokens.encode_kept(tokens.KeptIds((2, 2), (7, 9, 5, 6)))])
def test_log_probabilities_of_an_unknown_distribution_are_left_out(kept_ids):
    exact = read_logprobs({**cut_off(), "kept_ids": kept_ids}).tokens()
    assert exact is not None
    assert (exact.kept_ids, exact.logprobs) == (None, None)


WEIGHTS = {OTHERS: 0.0, "right": 2.0, "reward": 0.5}


@pytest.mark.parametrize(
    ("recorded", "reward", "shaped", "found"),
    [
        ({"right": 1.0, "brief": 3.0}, 2.0, None, {"right": 1.0, "brief": 3.0}),
        ({"right": 1.0, "reward": 1.0}, 2.5, None, {"right": 1.0, "reward": 0.5}),
        ({"right": 1.0}, 3.0, None, {"right": 1.0, "reward": 1.0}),
        ({"right": 1.0}, 2.0, [0.5], {"right": 1.0, "reward": -0.5, "shaped_reward": 0.5}),
        ({}, 2.0, None, {"reward": 2.0}),
        (None, 2.0, None, {"reward": 2.0}),
    ],
)
def test_recorded_rewards_keep_their_names_and_the_total_is_the_trajectorys(recorded, reward, shaped, found):
    metadata = {"trajectory_id": "r/g/m0/a0/agent", "rewards": recorded}
    given = trajectory(item("assistant", "a", [-1.0]), reward=reward, shaped=shaped, **metadata)
    rewards = rollout_of(given, weights=WEIGHTS).rewards
    assert {one.name: one.value for one in rewards} == found
    weights = weights_of(WEIGHTS)
    assert sum(weights.get(one.name, weights[OTHERS]) * one.value for one in rewards) == reward
    another = given.model_copy(update={"metadata": {"rewards": recorded}})
    assert rollout_of(another).rewards[0].name == "reward", "another builder's metadata are its own"


HALF = "\ud800"
"""Half of a surrogate pair, which no JSON text can hold."""


@pytest.mark.parametrize(
    ("metadata", "recorded"),
    [
        ({"tool_calls": [{"id": 2**70}]}, [{"id": str(2**70)}]),
        ({"tool_calls": [{1: 2}]}, [{"1": 2}]),
        ({"tool_calls": [{"id": HALF}]}, [{"id": "?"}]),
    ],
    ids=["long integer", "key", "surrogate"],
)
def test_values_that_json_lacks_are_recorded_as_text(metadata, recorded):
    rollout = rollout_of(trajectory(item("user", HALF), item("assistant", f"a{HALF}", [-0.5], **metadata), id=HALF))
    assert rollout.error is None
    [step] = rollout.steps
    assert chat_of(step).answer == {"role": "assistant", "content": "a?", "tool_calls": recorded}
    assert RecordedRollout.model_validate_json(rollout.model_dump_json()) == rollout
    [(pair, _)] = rollouts_of_items(trajectory(DPOItem(prompt=HALF, chosen_response=f"a{HALF}", rejected_response="b")))
    assert RecordedRollout.model_validate_json(pair.model_dump_json()) == pair


@pytest.mark.parametrize(
    "given",
    [
        {"rewards": {"a": float("inf")}},
        {"rewards": {"a": "1"}},
        {"rewards": {"a": 1e308, "b": 1e308}, "reward": -1e308},
        {"reward": 1.7e308, "shaped": [-1.7e308]},
        {"rewards": {HALF: 1.0}},
    ],
    ids=["infinite", "text", "sum", "rest", "name"],
)
def test_rewards_that_cannot_be_recorded_fail_their_rollout_alone(given):
    one = trajectory(item("user", "q"), item("assistant", "a", [-0.5]), id="x", trajectory_id="t", **given)
    rollout = rollout_of(one, weights={"a": 2.0})
    assert rollout.source_id == "x"
    assert (rollout.error or "").startswith("cannot be recorded: ")
    assert not rollout.steps
