"""Files of recorded steps: every kind of line, which rollout a step belongs to, and what a run is told of it."""

import asyncio
import codecs
import itertools
import json
import random

import orjson

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import original
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.reading import read_to_end
from rollstream.harness.recorded.ingest import send_letters
from rollstream.harness.recorded.lines import BadLine, read_lines
from rollstream.harness.recorded.tasks import all_stored, inputs_of
from rollstream.producers.traces.spans import Selection
from rollstream.schemas.events.recorded import RecordedGroup, RecordedRollout
from tests.harness.recorded.ingest_rig import lines, run_of
from tests.rigs import nat_samples as nat
from tests.rigs.sources.source_tree import ROOT

ALL = Selection()


def members(group: RecordedGroup) -> list[RecordedRollout]:
    rollouts = [member.rollout for member in group.members if member.rollout is not None]
    assert len(rollouts) == len(group.members)
    return rollouts


def test_bare_steps_are_grouped_by_their_workflow_run_and_runs_by_their_input():
    runs = [run_of("a"), run_of("b"), run_of("c", question="2+2", answer="4")]
    mixed = [step for together in itertools.zip_longest(*runs) for step in together]
    rewards = [{"rollout_id": f"run-{name}", "reward": reward} for name, reward in (("a", 1), ("b", 0.5), ("c", 0))]
    ingested = read_lines(lines(*mixed, *rewards), ALL)
    assert not ingested.bad
    same, other = ingested.groups
    assert same.inputs == {"question": "1+1"}
    assert [rollout.source_id for rollout in members(same)] == ["run-a", "run-b"]
    assert [rollout.rewards[0].value for rollout in members(same)] == [1.0, 0.5]
    assert members(other)[0].steps[0].uuid == "c-call"
    assert ingested.num_steps == 18
    assert ingested.summary() == "3 rollouts of 2 examples from 18 steps"
    assert read_lines(lines(*mixed, *rewards), ALL) == ingested


def test_a_workflow_that_begins_is_a_new_run_although_its_function_has_the_same_id():
    first, second = run_of("a"), run_of("b", question="2+2", answer="4")
    for step in (*first, *second):
        step["function_ancestry"]["function_id"] = "w"
    for begin in (first[0], second[0]):
        del begin["payload"]["metadata"]  # with the id of the run
    ingested = read_lines(lines(*first, *second, first[0]), ALL)
    assert [(group.inputs, len(members(group))) for group in ingested.groups] == [
        ({"question": "1+1"}, 1),
        ({"question": "2+2"}, 1),
    ]


def test_the_example_file_has_every_kind_of_line():
    with (ROOT / "examples" / "data" / "recorded_steps.jsonl").open("rb") as file:
        ingested = read_lines(file, ALL)
    assert ingested.summary() == "6 rollouts of 3 examples from 16 steps"
    assert [[one.source_id for one in members(group)] for group in ingested.groups] == [
        ["a1", "a2"],
        ["b1", "b2"],
        ["c1", "c2"],
    ]
    assert [one.rewards[0].value for group in ingested.groups for one in members(group)] == [1.0, 0.0] * 3


def test_a_conversation_of_several_workflow_runs_is_one_rollout_if_asked():
    runs = [run_of("a", question="hi"), run_of("b", question="and now?")]
    for steps in runs:
        steps[0]["payload"]["metadata"]["provided_metadata"]["conversation_id"] = "c1"
    found = read_lines(lines(*runs[0], *runs[1]), ALL, key="conversation_id")
    [group] = found.groups
    [rollout] = members(group)
    assert rollout.source_id == "c1"
    assert [step.uuid for step in rollout.steps if step.event_type == "LLM_END"] == ["a-call", "b-call"]
    assert len(read_lines(lines(*runs[0], *runs[1]), ALL).groups) == 2


def test_whole_rollouts_named_steps_and_steps_without_a_workflow_are_read_too():
    call = nat.openai("u1", nat.messages("q"), "a")
    whole = {"rollout_id": "r1", "example_id": "x", "steps": run_of("a"), "reward": {"right": 1, "brief": 0.5}}
    whole |= {"step_rewards": {"a-call": -1}, "question": "1+1", "answer": "2"}
    named = [{"rollout_id": "r2", "example_id": "x", "step": step} for step in call]
    nameless = {"steps": call, "reward": 1, "inputs": {"question": "q"}}
    failed = {"rollout_id": "r4", "example_id": "x", "error": "the agent raised KeyError"}
    alone = nat.langchain("z", nat.messages("q"), "a", parent="root")
    ingested = read_lines(lines(whole, *named, nameless, failed, *alone), ALL)
    assert not ingested.bad
    group, of_inputs, loose = ingested.groups
    first, second, broken = members(group)
    assert group.inputs == {"question": "1+1", "answer": "2"}
    assert [(r.name, r.value, r.step) for r in first.rewards] == [
        ("right", 1.0, None),
        ("brief", 0.5, None),
        ("step_reward", -1.0, 0),
    ]
    assert len(second.steps) == 1
    assert broken.error == "the agent raised KeyError"
    assert members(of_inputs)[0].source_id == "rollout-3"
    assert members(loose)[0].source_id == "root"


def test_lines_that_occur_twice_count_once_and_another_reward_is_a_bad_line():
    whole = {"rollout_id": "r", "example_id": "x", "steps": run_of("a"), "reward": {"right": 1, "brief": 0.5}}
    other = {"rollout_id": "r", "reward": {"right": 0.5}}
    ingested = read_lines(lines(whole, whole, other), ALL)
    (rollout,) = members(ingested.groups[0])
    assert {one.name: one.value for one in rollout.rewards} == {"right": 1.0, "brief": 0.5}
    assert len(rollout.rewards) == 2
    (bad,) = ingested.bad
    assert (bad.number, bad.reason) == (3, "reward 'right' is 0.5, and 1.0 on an earlier line of r; give it once")


def test_a_line_without_uuids_counts_once_unless_it_is_a_rollout_without_a_name():
    call = nat.openai("", nat.messages("A"), "a")
    for found in ([{"rollout_id": "r", "steps": call}] * 2, [*call, *call]):
        (group,) = read_lines(lines(*found), ALL).groups
        assert len(members(group)[0].steps) == 1
    nameless = {"steps": call, "reward": 1.0}
    assert read_lines(lines(nameless, nameless), ALL).num_rollouts == 2, "the same answer, sampled twice"


def test_concurrent_calls_without_uuids_are_a_rollout_with_an_error():
    first, second = (nat.openai("", nat.messages(text), text) for text in "AB")
    whole = {"rollout_id": "r", "steps": [first[0], second[0], first[1], second[1]]}
    (rollout,) = members(read_lines(lines(whole), ALL).groups[0])
    assert rollout.error is not None
    assert rollout.error.startswith("a second LLM_START without a UUID before the end of the first")
    one_by_one = {"rollout_id": "r", "steps": [*first, *second]}
    assert members(read_lines(lines(one_by_one), ALL).groups[0])[0].error is None


def test_lines_that_contradict_an_earlier_line_of_their_rollout_are_bad():
    first = {"rollout_id": "r", "example_id": "x", "steps": run_of("a"), "step_rewards": {"a-call": 1}, "question": "q"}
    contradicting = {
        "step reward 'a-call' is 5.0, and 1.0": {"step_rewards": {"a-call": 5}},
        "input 'question' is 'p', and 'q'": {"question": "p"},
        "'example_id' is 'y', and 'x'": {"example_id": "y"},
    }
    ingested = read_lines(lines(first, *({"rollout_id": "r", **one} for one in contradicting.values()), first), ALL)
    assert [one.reason for one in ingested.bad] == [
        f"{reason} on an earlier line of r; give it once" for reason in contradicting
    ]
    (group,) = ingested.groups
    assert (group.example_id, group.inputs) == ("x", {"question": "q"})


def test_rollouts_of_one_example_have_one_question():
    (step,) = nat.langchain("c", nat.messages("1+1"), "2")[1:]
    first = {"rollout_id": "r1", "example_id": "e", "steps": [step], "question": "1+1"}
    other = {"rollout_id": "r2", "example_id": "e", "steps": [step], "question": "2+2"}
    later = [{"rollout_id": "r3", "step": step, "question": "2+2"}, {"rollout_id": "r3", "example_id": "e"}]
    more = {"rollout_id": "r4", "example_id": "e", "steps": run_of("d", question="3+3"), "answer": "2"}
    ingested = read_lines(lines(first, other, *later, more), ALL)
    reason = "input 'question' is '2+2', and '1+1' on an earlier line of example e; give it once"
    assert [(line.number, line.reason) for line in ingested.bad] == [(2, reason), (4, reason)]
    example, alone = ingested.groups
    assert (example.inputs, [one.source_id for one in members(example)]) == (
        {"question": "1+1", "answer": "2"},
        ["r1", "r4"],
    )
    assert alone.inputs == {"question": "2+2"}


def test_a_rollout_without_a_name_is_none_that_has_one():
    call = nat.openai("u1", nat.messages("q"), "a")
    nameless = {"steps": call, "reward": 1, "example_id": "b"}
    named = [{"rollout_id": f"rollout-{number}", "example_id": "a", "steps": call} for number in (2, 1)]
    for order in ([named[0], nameless, named[1]], [nameless, *named]):
        ingested = read_lines(lines(*order), ALL)
        found = {group.example_id: [one.source_id for one in members(group)] for group in ingested.groups}
        assert found == {"a": ["rollout-2", "rollout-1"], "b": ["rollout-3"]}


def test_a_byte_order_mark_is_ignored():
    first, *others = lines({"rollout_id": "r", "steps": run_of("a"), "reward": 1})
    assert not read_lines([codecs.BOM_UTF8 + first, *others], ALL).bad


BAD = {
    "{": "not valid JSON",
    "[]": "not a JSON object",
    '{"a": 1}': "expected an intermediate step",
    '{"payload": {}}': "parent_id: Field required",
    '{"rollout_id": "r", "reward": "high"}': "reward.reward is 'high'; expected a finite number",
    '{"rollout_id": "r", "rewards": [1]}': "rewards must be an object of numbers",
    '{"rollout_id": "r", "score": 1}': "unknown key 'score'",
    '{"rollout_id": "r", "reward": 1, "rewards": {"reward": 0}}': "reward 'reward' is 0.0, and 1.0 as the line",
    '{"rollout_id": "r", "steps": [], "step": {}}': "both step and steps",
    '{"rollout_id": "r", "steps": {}}': "steps: must be a list",
    '{"rollout_id": "r", "inputs": []}': "",
    '{"rollout_id": "r", "steps": [{"parent_id": 3}]}': "parent_id: Input should be a valid string",
}


def test_a_bad_line_is_reported_with_its_reason_and_the_rest_is_read():
    good = lines({"rollout_id": "g", "steps": run_of("a"), "reward": 1})
    raws = [raw.encode() for raw in BAD if BAD[raw]] + [b"\xff\xfe"]
    ingested = read_lines([*raws, b"", *good], ALL)
    assert ingested.num_rollouts == 1
    assert [line.number for line in ingested.bad] == list(range(1, len(raws) + 1))
    for line, message in zip(ingested.bad, [*filter(None, BAD.values()), "not valid JSON"], strict=True):
        assert message in line.reason, line
    assert f"{len(raws)} bad lines" in ingested.summary()


def nested(depth):
    return json.loads('{"a": ' + "[" * depth + "]" * depth + "}")


def test_a_line_that_is_nested_too_deeply_for_a_record_is_bad(tmp_path):
    deep, usable = run_of("a"), run_of("b")
    deep[1]["payload"]["metadata"] = nested(240)
    usable[1]["payload"]["metadata"] = nested(225)
    found = [{"rollout_id": name, "steps": steps} for name, steps in (("deep", deep), ("b", usable))]
    raws = [b'{"rollout_id": "c", "inputs": ' + b'{"a":' * 1000 + b"1" + b"}" * 1001, *lines(*found)]
    ingested = read_lines(raws, ALL)
    reason = "nested too deeply to be recorded; use fewer levels of lists and objects"
    assert [(bad.number, bad.reason) for bad in ingested.bad] == [(1, reason), (2, reason)]
    stored = asyncio.run(all_stored(ingested.groups, ArtifactStore(str(tmp_path))))
    assert [group.example_id for group in stored] == [group.example_id for group in ingested.groups]
    assert [orjson.loads(orjson.dumps(inputs_of(group)))["question"] for group in stored] == ["1+1"]


def test_inconsistent_lines_are_a_rollout_with_an_error():
    ghost = {"rollout_id": "ghost", "reward": 1.0}
    stray = {"rollout_id": "r", "steps": run_of("a"), "step_rewards": {"nobody": 1.0}}
    errors = [members(group)[0].error for group in read_lines(lines(ghost, stray), ALL).groups]
    assert errors == ["no steps were recorded", "step_rewards: no step has the UUID nobody"]


def test_an_answer_with_a_template_of_tool_calls_is_recorded_as_it_is():
    answer = 'The template is:\n\nTool calls: {{"name": "search", "arguments": {{"q": "x"}}}}'
    ingested = read_lines(lines(*run_of("a"), *run_of("b", answer=answer)), ALL)
    assert not ingested.bad
    (_, template) = members(ingested.groups[0])
    assert template.error is None
    answers = [step.chat.answer["content"] for step in template.steps if step.chat is not None]
    assert answers == [answer]


def test_the_summary_counts_calls_that_are_not_trained_on_by_reason():
    steps = run_of("a", ids=False) + run_of("b", model="judge")
    chosen = Selection(target_model=nat.MODEL)
    assert read_lines(lines(*steps), chosen).untrained == {"no_token_ids": 1, "not_targeted": 1}
    assert read_lines(lines(*steps), chosen, retokenise=True).untrained == {"not_targeted": 1}


def test_lines_of_runs_in_any_order_that_keeps_each_runs_own_are_the_same_rollouts():
    runs = [run_of(name, question=name) for name in "abc"]
    whole = {group.example_id: group for group in read_lines(lines(*itertools.chain(*runs)), ALL).groups}
    for seed in range(20):
        order = random.Random(seed).sample([n for n, steps in enumerate(runs) for _ in steps], 18)
        left = [iter(steps) for steps in runs]
        found = read_lines(lines(*(next(left[n]) for n in order)), ALL)
        assert {group.example_id: group for group in found.groups} == whole


def test_a_workflow_with_too_large_an_input_is_a_bad_line():
    ingested = read_lines(lines(*run_of("a", question="x" * 600_000)[:1], *run_of("b")), ALL)
    assert ["bytes of inputs" in line.reason for line in ingested.bad] == [True]


def test_every_bad_line_is_a_dead_letter_with_its_bytes(tmp_path):
    async def add_dead_letter():
        log, artifacts = MemoryLog(), ArtifactStore(str(tmp_path))
        await log.start()
        bad = [BadLine(3, b"{", "not valid JSON"), BadLine(9, b"\xff", "no")]
        await send_letters(log, artifacts, bad, tmp_path / "steps.jsonl")
        letters = [record async for record in read_to_end(log, "dlq")]
        return [(dict(letter.headers), original(letter, artifacts)) for letter in letters]

    found = asyncio.run(add_dead_letter())
    assert [record.value for _, record in found] == [b"{", b"\xff"]
    assert [record.offset for _, record in found] == [3, 9]
    reason = found[0][0]["__connect.errors.exception.message"]
    assert reason is not None
    assert reason.endswith(b"steps.jsonl line 3: not valid JSON")
