"""Rollouts with many calls: what is kept of a call, and what a call costs, follow what is new in it."""

import asyncio
import itertools
from typing import Any

from rollstream.eventlog.log import Encoded
from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.rollout.gateway_interface import CallOptions
from rollstream.producers.rollout.journal import Journal
from rollstream.producers.rollout.registry import register_environment, register_reward
from rollstream.producers.rollout.session import Session
from tests.producers.conftest import answers, output_of, scripted, task_of
from tests.producers.gateway.gateway_rig import recorded_of

ROLLOUT = "run-1/rl/e00000/t00000/m0/a0"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def journal_of(task: Any) -> Journal:
    async def emit(encoded: Encoded) -> None:
        pass

    counter = itertools.count(1000)
    return Journal(task, ROLLOUT, emit, lambda: next(counter))


def session_of(task: Any, journal: Journal, engine: Any) -> Session:
    return Session(task, member=0, engine=engine, journal=journal, demonstrator=None)  # type: ignore[arg-type]


def inputs_of(steps: Any) -> list[list[Any]]:
    return [step.data["input"] for step in steps]


def test_the_steps_of_a_conversation_share_its_messages_and_a_changed_one_is_its_own(tmp_path):
    async def scenario() -> None:
        journal = journal_of(task_of())
        session = session_of(task_of(), journal, await scripted(tmp_path, answers("5", "6", "7", "8")))
        messages = [user("a")]
        for number in range(3):
            reply = await session.chat(messages)
            messages += [reply.message, user(f"go on {number}")]
        first, second, third = inputs_of(journal.steps)
        assert second[0] is first[0]
        assert [one is other for one, other in zip(third, second, strict=False)] == [True] * 3
        assert len(third) == 5
        session.messages["agent"][0]["content"] = "changed"
        await session.chat([user("a"), *messages[1:]])
        assert inputs_of(journal.steps)[-1][0] == user("a")

    asyncio.run(scenario())


def test_messages_that_only_python_calls_equal_are_not_shared(tmp_path):
    async def scenario() -> None:
        journal = journal_of(task_of())
        session = session_of(task_of(), journal, await scripted(tmp_path, answers("5", "6")))
        reply = await session.chat([user("a") | {"n": 1}])
        await session.chat([user("a") | {"n": True}, reply.message, user("b")])
        assert [messages[0]["n"] is True for messages in inputs_of(journal.steps)] == [False, True]

    asyncio.run(scenario())


def test_steps_of_another_process_share_their_messages_too(play):
    @register_environment("test_grows")
    async def grows(session):
        messages = [user("a")]
        for number in range(3):
            reply = await session.chat(messages)
            messages += [reply.message, user(f"go on {number}")]
        await session.reward(1.0)

    played = play(task_of("test_grows"), answers("5", "6", "7"))
    journal = journal_of(task_of())
    journal.restore(recorded_of(played))
    first, second, third = inputs_of(step for step in journal.steps if step.llm)
    assert second[0] is first[0]
    assert third[2] is second[2]
    assert inputs_of(step for step in played.steps if step.llm) == [first, second, third]


def test_a_reward_function_gets_steps_and_messages_of_its_own(play):
    seen: list[Any] = []

    @register_environment("test_grows_and_is_rewarded")
    async def grows(session):
        reply = await session.chat([user("a")])
        await session.chat([user("a"), reply.message, user("b")])

    @register_reward("test_looks_at_steps")
    def looks(rollout):
        seen.extend(rollout.steps)
        rollout.steps[0].data["output"] = "changed"
        for step in rollout.steps:
            for message in step.data["input"]:
                message["words"] = message.pop("content").split()
        for message in rollout.messages["agent"]:
            message["content"] = "changed"
        return 1.0

    @register_reward("test_looks_again")
    def looks_again(rollout):
        assert [len(step.data["input"]) for step in rollout.steps] == [1, 3]
        assert "changed" not in str((rollout.steps, rollout.messages))
        return 1.0

    played = play(
        task_of("test_grows_and_is_rewarded", rewards=("test_looks_at_steps", "test_looks_again")), answers("5", "6")
    )
    assert played.last.kind == "rollout_ended", played.last
    assert seen[1].data["input"][0] == seen[0].data["input"][0] == {"role": "user", "words": ["a"]}
    assert output_of(played.steps[0]) == "5"


def test_messages_may_come_from_a_generator_and_the_ids_of_a_prompt_are_the_answers_own(play):
    @register_environment("test_generates")
    async def generates(session):
        await session.relabel((one for one in [user("a")]), "5")
        reply = await session.chat(one for one in [user("a")])
        assert isinstance(reply.prompt_ids, tuple)
        assert hash(reply) is not None
        await session.reward(1.0)

    played = play(task_of("test_generates"), answers("5"))
    assert played.last.kind == "rollout_ended", played.last
    assert inputs_of(played.steps) == [[user("a")]] * 2


def test_nobody_scores_a_label_and_no_prompt_goes_on_from_it(play):
    @register_environment("test_labels")
    async def labels(session):
        reply = await session.chat([user("a")])
        await session.relabel([user("a")], reply.text)
        assert session.messages["agent"][-1]["content"] == reply.text
        await session.relabel([user("a")], "other")
        assert session.messages["agent"][-1]["content"] == reply.text
        await session.chat([user("a"), {"role": "assistant", "content": reply.text}, user("b")])
        await session.reward(1.0)

    calls = [step.llm for step in play(task_of("test_labels"), answers("5", "6")).steps]
    assert calls[-1].prefix.step_index == 0
    assert [bool(call.spans) for call in calls] == [True, False, False, True]


def test_a_count_of_tokens_goes_on_from_the_conversation_as_the_call_does(tmp_path):
    encoded: list[str] = []

    class RecordingTokenizer(ScriptedTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            encoded.append(text)
            return super().encode(text, add_special_tokens=add_special_tokens)

    async def scenario() -> None:
        engine = await scripted(tmp_path, answers("5", "6"))
        engine._tokenizer = RecordingTokenizer()
        session = session_of(task_of(), journal_of(task_of()), engine)
        reply = await session.chat([user("long " * 1000)])
        messages = [user("long " * 1000), reply.message, user("b")]
        encoded.clear()
        counted = session.count_tokens(messages, "agent", CallOptions())
        assert sum(map(len, encoded)) < 100
        assert len((await session.chat(messages)).prompt_ids) == counted

    asyncio.run(scenario())
