"""One attempt at a rollout: its events, its failures, and that a repeat is equal."""

import asyncio
import contextlib
import math
import re
import sys

import pytest

from rollstream.producers import attempt as rollout
from rollstream.producers.attempt import run_rollout
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.schemas import tokens
from rollstream.schemas.errors import EnvironmentRunError, LogError, ModelError
from rollstream.schemas.events import RolloutEnded, RolloutFailed, RolloutStarted
from tests.producers.conftest import answers, scripted, task_of

HELLO = [{"role": "user", "content": "?"}]


def test_an_attempt_begins_ends_and_is_complete(play):
    played = play(task_of(inputs={"secret": 7}), answers("5", "7"))
    assert isinstance(played.events[0], RolloutStarted)
    assert [step.event_type for step in played.steps] == ["LLM_END", "TOOL_END", "LLM_END", "TOOL_END"]
    assert [reward.value for reward in played.rewards] == [0.85]
    assert isinstance(played.last, RolloutEnded)
    played.assert_complete()


def test_a_repeat_with_the_equal_seed_gives_equal_content(play):
    first, again = play(task_of(seed=3)), play(task_of(seed=3))
    assert first.contents() == again.contents()
    assert play(task_of(seed=4)).texts() != first.texts()


def test_members_differ_but_share_what_they_are_compared_under(play):
    members = [play(task_of(seed=3), member=member) for member in range(6)]
    assert len({tuple(member.texts()) for member in members}) > 1
    assert len({member.steps[0].rollout_id for member in members}) == 6


def test_a_demonstration_has_text_and_tokens_but_no_logprobs(play):
    played = play(task_of(policy="demonstration", seed=5))
    played.assert_complete()
    for step in played.steps[::2]:
        assert step.llm.logprobs is None
        assert step.llm.spans == ()
        assert tokens.decode_ids(step.llm.completion_ids)[-1] == 1
        assert step.data["output"].isdigit()


class Answering(Environment):
    """Its demonstrator and its scripted player answer what the task's inputs hold."""

    SCRIPTED = ("bot",)

    async def run(self, session):
        assert (await session.chat(session.inputs.get("messages", HELLO))).text == "7"
        await session.reward(1.0)

    def demonstrate(self, session, messages, agent):
        return session.inputs["answer"]

    async def play_scripted(self, session, messages, agent, player):
        return session.inputs["answer"]


register_environment("test_answers_from_inputs")(Answering)


def test_a_demonstration_that_has_the_end_token_gets_no_second_one(play):
    for answer in ("7", "7<end>"):
        played = play(task_of("test_answers_from_inputs", policy="demonstration", inputs={"answer": answer}))
        played.assert_complete()
        assert tokens.decode_ids(played.steps[0].llm.completion_ids).tolist().count(1) == 1


def played_by_bot(tmp_path, inputs):
    events = []

    async def emit(event):
        events.append(event)

    async def scenario():
        task = task_of("test_answers_from_inputs", inputs=inputs)
        engine, players = await scripted(tmp_path), {"agent": "scripted:bot"}
        await run_rollout(task, member=0, attempt=0, engine=engine, emit=emit, clock=lambda: 1, players=players)

    asyncio.run(scenario())
    return events


def test_a_scripted_player_is_sent_messages_with_keys_of_their_own(tmp_path):
    messages = [{"role": "user", "board": ["x", "", "o"]}]
    *_, step, _, last = played_by_bot(tmp_path, {"answer": "7", "messages": messages})
    assert isinstance(last, RolloutEnded)
    assert step.data["input"] == messages


@pytest.mark.parametrize("answer", ["7", None, 5, {"a": 1}])
def test_a_scripted_player_may_be_async_and_answers_with_text(tmp_path, answer):
    events = played_by_bot(tmp_path, {"answer": answer})
    if answer == "7":
        assert isinstance(events[-1], RolloutEnded)
    else:
        expected = f"play_scripted() returned a {type(answer).__name__}; expected text"
        assert (events[-1].cause, expected in events[-1].message) == ("environment_error", True)


def test_an_unknown_environment_fails_as_data(play):
    failed = play(task_of("guess_nummer")).last
    assert isinstance(failed, RolloutFailed)
    assert failed.cause == "environment_error"
    assert "did you mean guess_number?" in failed.message


# ---- what fails, and how ----


@register_environment("test_raises")
async def raises(session, detail=""):
    raise RuntimeError(f"the board\nis broken {detail}")


@register_environment("test_hangs")
async def hangs(session):
    await session.chat(HELLO)
    await asyncio.sleep(3600)


@register_environment("test_will_not_stop")
async def will_not_stop(session):
    for _ in range(15):
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            with contextlib.suppress(EnvironmentRunError):
                await session.reward(1.0)


@register_environment("test_exits")
async def exits(session):
    sys.exit(3)


@register_environment("test_interrupts")
async def interrupts(session):
    raise KeyboardInterrupt


@register_environment("test_sends_text")
async def sends_text(session):
    await session.chat("hello")


@register_environment("test_sends_no_role")
async def sends_no_role(session):
    await session.chat([{"content": "hello"}])


@register_environment("test_sends_no_content")
async def sends_no_content(session, last):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    await session.chat([*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}])
    await session.chat([*HELLO, last])


@register_environment("test_forgives")
async def forgives(session):
    with contextlib.suppress(ModelError):
        await session.chat(HELLO)
    await session.reward(1.0)


@register_environment("test_leaves_a_call_open")
async def leaves_a_call_open(session):
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(session.chat(HELLO), 0.01)


@register_environment("test_talks_on")
async def talks_on(session):
    while True:
        await session.chat(HELLO)


@register_environment("test_talks_in_a_task_group")
async def talks_in_a_task_group(session):
    async with asyncio.TaskGroup() as group:
        group.create_task(talks_on(session))


def test_an_environment_that_raises_is_one_clear_line(play):
    failed = play(task_of("test_raises")).last
    assert (failed.cause, failed.is_final) == ("environment_error", False)
    location = r"test_rollout\.py line \d+, in raises"
    assert re.fullmatch(rf"environment test_raises: RuntimeError \({location}\): the board is broken", failed.message)


def looks_up(table):
    return at_depth(table)


def at_depth(table):
    return table["no such key"]


@register_environment("test_looks_up")
async def looks_up_in_vain(session):
    looks_up({})


def test_an_exception_in_user_code_is_logged_with_traceback_and_recorded_with_line(play, caplog):
    failed = play(task_of("test_looks_up")).last
    line = at_depth.__code__.co_firstlineno + 1
    expected = f"environment test_looks_up: KeyError (test_rollout.py line {line}, in at_depth): 'no such key'"
    assert failed.message == expected
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    logged, _, shown = record.getMessage().partition("\n")
    assert logged == expected
    assert [line.rsplit(" ", 1)[1] for line in shown.splitlines() if line.startswith("  File ")][-3:] == [
        "looks_up_in_vain",
        "looks_up",
        "at_depth",
    ]


def test_the_last_attempt_is_final(play):
    assert play(task_of("test_raises", max_attempts=2), attempt=1).last.is_final


def test_a_secret_of_the_configuration_is_in_no_message(play, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cr3t")
    failed = play(task_of("test_raises", environment_config={"detail": "${JUDGE_KEY}"})).last
    assert failed.message.endswith("is broken ${JUDGE_KEY}")


def test_an_environment_that_hangs_times_out_and_keeps_what_it_did(play):
    played = play(task_of("test_hangs", rollout_timeout_s=1.0))
    assert played.last.cause == "timeout"
    assert "test_hangs" in played.last.message
    assert len(played.steps) == 1


def test_an_environment_that_will_not_stop_records_nothing_after_its_end(play, monkeypatch):
    monkeypatch.setattr(rollout, "GRACE_S", 0.1)
    played = play(task_of("test_will_not_stop", rollout_timeout_s=0.05))
    assert played.last.cause == "timeout"
    assert played.rewards == []


@pytest.mark.parametrize(
    ("name", "message"), [("test_exits", "called sys.exit(3)"), ("test_interrupts", "raised KeyboardInterrupt")]
)
def test_an_environment_that_exits_ends_no_process(play, name, message):
    failed = play(task_of(name)).last
    assert failed.cause == "environment_error"
    assert message in failed.message


@pytest.mark.parametrize(
    ("name", "sent"), [("sends_text", "'hello'"), ("sends_no_role", "[{'content': 'hello'}]")], ids=["text", "no role"]
)
def test_messages_of_another_form_are_refused_with_the_right_one(play, name, sent):
    failed = play(task_of(f"test_{name}")).last
    assert failed.cause == "environment_error"
    assert "messages: expected a list of messages such as " in failed.message
    assert f"not {sent} (test_rollout.py line " in failed.message
    assert failed.message.endswith(f", in {name})")


@pytest.mark.parametrize("last", [{"role": "user"}, {"role": "assistant"}, {"role": "assistant", "tool_calls": []}])
def test_a_message_without_content_is_refused_unless_it_is_an_answer_with_tool_calls(play, last):
    played = play(task_of("test_sends_no_content", environment_config={"last": last}))
    assert len(played.steps) == 1
    line = sends_no_content.__code__.co_firstlineno + 4
    assert played.last.message == (
        f"environment test_sends_no_content: messages[1]: {last} has no content; give a text "
        f"(test_rollout.py line {line}, in sends_no_content)"
    )


def test_an_engine_error_fails_the_attempt_even_if_the_environment_catches_it(play):
    def refuses(prompt, rng, version):
        raise ModelError("out of memory")

    failed = play(task_of("test_forgives"), refuses).last
    assert (failed.cause, failed.message) == ("engine_error", "ModelError: out of memory")


def test_an_engine_without_weights_is_an_engine_error(play):
    assert play(task_of(), engine=ScriptedEngine()).last.cause == "engine_error"


def test_a_nan_log_probability_is_an_engine_error(play):
    assert play(task_of(), lambda *_: ("5", math.nan)).last.cause == "engine_error"


def test_a_call_left_open_fails_the_attempt(play, tmp_path):
    engine = asyncio.run(scripted(tmp_path, delay_s=5))
    failed = play(task_of("test_leaves_a_call_open"), engine=engine).last
    assert failed.cause == "environment_error"
    assert "1 unfinished calls" in failed.message


@pytest.mark.parametrize("name", ["test_talks_on", "test_talks_in_a_task_group"])
def test_an_attempt_at_its_limit_of_turns_is_complete(play, name):
    played = play(task_of(name, max_turns=3))
    assert len(played.steps) == 3
    assert played.last.stop_reason == "max_turns"
    played.assert_complete()


def test_an_exception_in_emit_propagates_without_a_terminal_event(tmp_path):
    sent = []

    async def emit(event):
        if len(sent) == 2:
            raise LogError("the broker is gone")
        sent.append(event)

    async def run():
        engine = await scripted(tmp_path)
        await run_rollout(task_of(), member=0, attempt=0, engine=engine, emit=emit, clock=lambda: 1)

    with pytest.raises(LogError, match="the broker is gone"):
        asyncio.run(run())
    assert [event.kind for event in sent] == ["rollout_started", "step_recorded"]


def test_a_cancelled_attempt_stops_its_environment_and_ends_nothing(tmp_path):
    sent = []

    async def emit(event):
        sent.append(event)

    async def run():
        engine = await scripted(tmp_path)
        play = asyncio.create_task(
            run_rollout(task_of("test_hangs"), member=0, attempt=0, engine=engine, emit=emit, clock=lambda: 1)
        )
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        play.cancel()
        with pytest.raises(asyncio.CancelledError):
            await play
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert [event.kind for event in sent] == ["rollout_started", "step_recorded"]
