"""Records of a session: exact prompts by prefix, several agents, NAT's fields, rewards in their place."""

import asyncio
import json
import random
import uuid

import numpy as np
import pytest
import torch

from rollstream.processors.assemble.sequences import dead_branches
from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.rollout.conversation import Conversation, ids_sha256
from rollstream.producers.rollout.journal import uuid_of
from rollstream.producers.rollout.registry import register_environment
from rollstream.schemas import tokens
from tests.producers.conftest import answers, scripted, task_of

TWO = {"ann": "run-1/ann", "bob": "run-1/bob"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def prompts_of(steps):
    """Whole prompt of each LLM step, rebuilt from prefixes as a reader does, with every sha256 checked."""
    whole, prompts = {}, []
    for step in steps:
        if step.llm is None:
            continue
        call, start = step.llm, tokens.decode_ids("")
        if call.prefix is not None:
            start = whole[step.agent, call.prefix.step_index][: call.prefix.length]
            assert len(start) == call.prefix.length
            assert ids_sha256(start) == call.prefix.sha256
        prompt = start + tokens.decode_ids(call.prompt_ids)
        whole[step.agent, step.step_index] = prompt + tokens.decode_ids(call.completion_ids)
        prompts.append(prompt.tolist())
    return prompts


def test_a_later_prompt_is_an_earlier_one_and_new_ids_and_the_engine_saw_just_that(play, tmp_path):
    engine = asyncio.run(scripted(tmp_path, answers("5", "8", "7")))
    played = play(task_of(inputs={"secret": 7}), engine=engine)
    calls = [step.llm for step in played.steps if step.llm]
    assert [call.prefix and call.prefix.step_index for call in calls] == [None, 0, 2]
    assert [tokens.count(call.prompt_ids) for call in calls] == [4, 4, 4]
    assert prompts_of(played.steps) == [list(request.prompt_ids) for request in engine.requests]


def test_an_edited_history_is_tokenised_whole(play):
    @register_environment("test_edits")
    async def edits(session):
        await session.chat([user("1"), user("2")])
        await session.chat([user("3")])

    calls = [step.llm for step in play(task_of("test_edits")).steps]
    assert [call.prefix for call in calls] == [None, None]


def test_an_answer_that_comes_back_changed_keeps_the_prompt_before_it(play):
    @register_environment("test_trims")
    async def trims(session):
        reply = await session.chat([user("1")])
        await session.chat([user("1"), assistant(reply.text.strip()), user("2")])

    played = play(task_of("test_trims"), answers(" 5 "))
    first, second = (step.llm for step in played.steps)
    assert second.prefix.length == tokens.count(first.prompt_ids)
    prompts_of(played.steps)


def test_an_answer_cut_at_the_limit_goes_on_in_the_next_prompt(play):
    @register_environment("test_cut")
    async def cut(session):
        reply = await session.chat([user("1")])
        assert reply.finish_reason == "length"
        await session.chat([user("1"), assistant(reply.text), user("2")])

    played = play(task_of("test_cut", sampling={"max_new_tokens": 2}), answers("12345"))
    first, second = (step.llm for step in played.steps)
    assert second.prefix.length == tokens.count(first.prompt_ids) + 2
    assert played.texts()[0] == "12"


def test_a_branch_goes_on_from_the_call_that_it_branched_from(play):
    @register_environment("test_branches")
    async def branches(session):
        root = [user("1")]
        root.append(assistant((await session.chat(root)).text))
        await session.chat([*root, user("2")])
        await session.chat([*root, user("3")])

    calls = [step.llm for step in play(task_of("test_branches")).steps]
    assert [call.prefix and call.prefix.step_index for call in calls] == [None, 0, 0]


def test_several_answers_to_one_request_name_the_first_of_them(play):
    @register_environment("test_asks_for_several")
    async def asks_for_several(session):
        await session.sample([user("1")], 1)
        await session.sample([user("1")], 2)
        await session.sample([user("1")], 2)

    steps = play(task_of("test_asks_for_several")).steps
    assert [step.llm.request for step in steps] == [None, 1, 1, 3, 3]


def test_a_prompt_names_the_answers_that_it_has_as_text(play):
    @register_environment("test_compacts")
    async def compacts(session):
        talk = [user("1")]
        talk.append(assistant((await session.chat(talk)).text))
        await session.chat([*talk, user("sum up")])
        summary = await session.chat([*talk, user("sum up")])
        shown = json.dumps({"so_far": summary.text.rpartition("</think>")[2]})
        await session.chat([user(shown), user("2")])

    script = answers("one", "<think>hm</think> bad", '<think>so</think> it "was"\none', "two")
    steps = play(task_of("test_compacts"), script).steps
    assert [step.llm.uses for step in steps] == [(), (), (), (2,)]
    assert [step.llm.prefix and step.llm.prefix.step_index for step in steps] == [None, 0, 1, None]
    assert dead_branches(steps) == {1}


def test_a_prompt_is_the_text_s_own_tokens_however_it_was_put_together():
    tokenizer, rng = ScriptedTokenizer(), random.Random(0)
    for _ in range(50):
        conversation, messages = Conversation(tokenizer), []
        for step_index in range(4):
            messages.append(user("".join(rng.choices("abc 123\u00e9", k=rng.randrange(4)))))
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompt = conversation.prompt(text)
            assert prompt.token_ids.tolist() == tokenizer.encode(text)
            end = [1] if rng.random() < 0.7 else []
            completion = tokenizer.encode("".join(rng.choices("xyz", k=rng.randrange(1, 4))))
            messages.append(assistant(conversation.append_sampled(step_index, prompt, completion + end)))


def test_several_agents_interleave_with_conversations_of_their_own(play):
    @register_environment("test_pair")
    async def pair(session):
        async def talk(agent, turns):
            messages = [user(agent)]
            for _ in range(turns):
                reply = await session.chat(messages, agent=agent)
                await session.reward(1.0, "spoke", step_index=reply.step_index, agent=agent)
                messages += [assistant(reply.text), user("?")]

        await asyncio.gather(*(talk(agent, 3) for agent in session.agents))

    played = play(task_of("test_pair", agents=TWO))
    played.assert_complete()
    by_agent = {name: [step for step in played.steps if step.agent == name] for name in TWO}
    for name, steps in by_agent.items():
        own = [step.step_index for step in steps]
        assert [step.llm.prefix and step.llm.prefix.step_index for step in steps] == [None, *own[:-1]]
        assert {span.model_group for step in steps for span in step.llm.spans} == {TWO[name]}
    assert by_agent["ann"][0].step_index < by_agent["bob"][0].step_index < by_agent["ann"][-1].step_index
    prompts_of(played.steps)
    assert played.contents() == play(task_of("test_pair", agents=TWO)).contents()


def test_a_step_has_the_fields_that_nat_readers_expect(play):
    played = play(task_of(inputs={"secret": 5}), answers("5"))
    llm, tool = played.steps
    assert llm.data == {"input": [{"role": "user", "content": "?"}], "output": "5"}
    assert llm.usage_info["token_usage"]["total_tokens"] == 6
    assert llm.function_ancestry.function_name == "<workflow>"
    assert (llm.name, llm.parent_id) == ("run-1/policy", "root")
    assert (tool.event_type, tool.name, tool.data) == ("TOOL_END", "compare", {"input": "5", "output": "="})
    assert llm.uuid != tool.uuid
    assert llm.event_timestamp >= llm.span_event_timestamp


def test_later_changes_of_messages_and_data_are_not_in_the_record(play):
    @register_environment("test_mutates")
    async def mutates(session):
        messages, board = [user("1")], {"cells": [1]}
        await session.chat(messages)
        messages[0]["content"] = "9"
        await session.tool("look", board, (1, 2))
        board["cells"].append(2)

    chat, tool = play(task_of("test_mutates")).steps
    assert chat.data["input"] == [user("1")]
    assert tool.data == {"input": {"cells": [1]}, "output": [1, 2]}


@pytest.mark.parametrize(
    ("name", "cause", "words"),
    [("nobody", "environment_error", "nobody"), ("object", "environment_error", "output of tool look")],
)
def test_misuse_is_named(play, name, cause, words):
    @register_environment(f"test_misuse_{name}")
    async def misuse(session):
        if name == "nobody":
            await session.chat([user("1")], agent="nobody")
        await session.tool("look", 1, object())

    failed = play(task_of(f"test_misuse_{name}")).last
    assert failed.cause == cause
    assert words in failed.message


def test_several_answers_to_the_same_messages_are_one_turn_and_each_begins_a_branch(play, tmp_path):
    @register_environment("test_samples")
    async def samples(session):
        replies = await session.sample([user("1")], 3)
        await session.score(replies, [0.0, 2.0, 1.0], selected=2)
        assert session.messages["agent"] == (user("1"), assistant(replies[2].text))
        await session.chat([user("1"), assistant(replies[2].text), user("2")])
        await session.reward(0.5)

    engine = asyncio.run(scripted(tmp_path, answers("5", "6", "7", "8")))
    played = play(task_of("test_samples", max_turns=2), engine=engine)
    played.assert_complete()
    calls = [step for step in played.steps if step.llm]
    assert played.texts() == ["5", "6", "7", "8"]
    assert [call.llm.prefix and call.llm.prefix.step_index for call in calls] == [None, None, None, 2]
    assert prompts_of(played.steps) == [list(request.prompt_ids) for request in engine.requests]
    assert len({request.seed for request in engine.requests}) == 4
    assert [(r.step_index, r.value, r.is_score) for r in played.rewards] == [
        (0, 0.0, True),
        (1, 2.0, True),
        (2, 1.0, True),
        (None, 0.5, False),
    ]
    assert [step.metadata["is_selected"] for step in played.steps if step.event_type == "TTC_END"] == [0, 0, 1]


@pytest.mark.parametrize("selected", [np.int64(1), torch.tensor(1)])
def test_the_selected_answer_may_be_an_integer_of_a_library(play, selected):
    @register_environment("test_library_index")
    async def picks(session):
        await session.score(await session.sample([user("1")], 2), [0.0, 1.0], selected=selected)
        await session.reward(1.0)

    played = play(task_of("test_library_index"))
    played.assert_complete()
    assert [step.metadata["is_selected"] for step in played.steps if step.event_type == "TTC_END"] == [False, True]


@pytest.mark.parametrize(("selected", "words"), [(-1, "selected is -1"), (2, "selected is 2"), (0.5, "is a float")])
def test_a_selected_answer_that_is_not_there_is_refused_before_any_score(play, selected, words):
    @register_environment("test_no_such_answer")
    async def picks(session):
        await session.score(await session.sample([user("1")], 2), [0.0, 1.0], selected=selected)

    played = play(task_of("test_no_such_answer"))
    assert words in played.last.message
    assert played.rewards == []


def test_samples_are_the_same_however_often_they_are_drawn_and_end_with_the_turns(play):
    @register_environment("test_resampled")
    async def resampled(session):
        for _ in range(3):
            await session.sample([user("1")], 4)

    first, second = (play(task_of("test_resampled", max_turns=2)) for _ in range(2))
    assert first.contents() == second.contents()
    assert len(first.texts()) == 8
    assert len(set(first.texts())) > 1
    assert first.last.stop_reason == "max_turns"


@pytest.mark.parametrize(
    ("num", "score", "says"),
    [(0, 0.0, "0 answers requested from agent agent"), (1, float("nan"), "score"), (1, "good", "score")],
)
def test_a_sample_that_cannot_be_drawn_or_scored_is_named(play, num, score, says):
    @register_environment("test_bad_score")
    async def bad(session):
        replies = await session.sample([user("1")], num)
        await session.score(replies, [score], selected=0)

    assert says in play(task_of("test_bad_score")).last.message


def test_the_uuid_of_a_step_is_that_of_its_name() -> None:
    for name in ("run-1/rl/e00000/t00000/m0/a0/s1", "é", *map(str, range(64))):
        assert uuid_of(name) == str(uuid.uuid5(uuid.NAMESPACE_URL, name))
