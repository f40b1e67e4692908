"""The messages of an agent that a replaced guess and a pair are about."""

from typing import Any

import pytest

from rollstream.learner.shared_model_group import GroupAgent, SharedAgentParams
from rollstream.learner.shared_model_group.examples import dpo_examples, sft_examples
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events.recorded import RecordedRollout, RecordedStep
from tests.rigs.runs.group_rig import GROUP, NAME, chat_step, sampled

VERIFIER = GroupAgent("verifier", SharedAgentParams(model_name="m", use_lora=False), NAME, is_verifier=True)
AGENTS = {"verifier": VERIFIER}


def untrained(answer: str) -> RecordedStep:
    return chat_step(answer, "2?").model_copy(update={"untrained": "opponent"})


def rollout(*steps: RecordedStep) -> RecordedRollout:
    return RecordedRollout(steps=steps)


def answers(step: RecordedStep) -> Any:
    assert step.chat is not None
    return step.chat.answer["content"]


def test_a_replaced_guess_is_the_last_message_that_is_trained() -> None:
    given = rollout(chat_step("first"), chat_step("guess"), untrained("last"))
    (example,) = sft_examples(AGENTS, GROUP, {}, {"verifier": [(given, 1)]})
    found = example.members[0].rollout
    assert found is not None
    assert [answers(step) for step in found.steps] == ["first", VERIFIER.verdict_texts[1], "last"]


@pytest.mark.parametrize(
    "given",
    [rollout(chat_step("first"), *sampled(8, 9, reward=1.0).steps), rollout()],
    ids=["tokens only", "silent"],
)
def test_a_guess_without_a_trained_message_as_text_is_refused(given: RecordedRollout) -> None:
    trained = rollout(chat_step("guess"))
    with pytest.raises(ConfigError, match="agent verifier, rollout 1 with a replaced guess: its last trained message"):
        sft_examples(AGENTS, GROUP, {}, {"verifier": [(trained, 1), (given, 1)]})


def test_a_guess_that_is_not_trained_is_left_out() -> None:
    given = [(rollout(untrained("guess")), 1), (rollout(chat_step("guess")), 1)]
    assert [group.example_id for group in sft_examples(AGENTS, GROUP, {}, {"verifier": given})] == ["verifier/1"]


def test_pairs_of_equal_answers_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sides = [[rollout(chat_step(answer)) for answer in answers] for answers in (("same", "good"), ("same", "bad"))]
    (pair,) = dpo_examples(AGENTS, GROUP, {"verifier": sides[0]}, {"verifier": sides[1]})
    assert pair.example_id == "verifier/1"
    assert "the same answer in 1 examples, which train nothing: verifier/0; they are left out" in caplog.text


def test_answers_whose_tool_calls_differ_in_their_ids_alone_are_equal(caplog: pytest.LogCaptureFixture) -> None:
    def side(number: int, *arguments: str) -> list[RecordedRollout]:
        calls = [{"id": f"{number}", "type": "function", "function": {"name": "f", "arguments": a}} for a in arguments]
        steps = [chat_step("") for _ in calls]
        chats = [step.chat for step in steps if step.chat is not None]
        with_calls = [
            chat.model_copy(update={"answer": {**chat.answer, "tool_calls": [call]}})
            for chat, call in zip(chats, calls, strict=True)
        ]
        return [rollout(step.model_copy(update={"chat": chat})) for step, chat in zip(steps, with_calls, strict=True)]

    (pair,) = dpo_examples(AGENTS, GROUP, {"verifier": side(1, "1", "2")}, {"verifier": side(2, "1", "3")})
    assert pair.example_id == "verifier/1"
    assert "the same answer in 1 examples" in caplog.text


def test_a_pair_compares_the_last_messages_that_are_trained() -> None:
    sides = [[rollout(chat_step(answer), untrained("last"))] for answer in ("good", "bad")]
    (pair,) = dpo_examples(AGENTS, GROUP, {"verifier": sides[0]}, {"verifier": sides[1]})
    found = [member.rollout.steps[0] for member in pair.members if member.rollout is not None]
    assert [(answers(step), step.untrained) for step in found] == [("good", None), ("bad", None)]
