"""Built-in evaluators: what they score and what they look at."""

import asyncio
import json
import re
from typing import Any

import pytest

from rollstream.producers.attempt import refusal
from rollstream.producers.evaluators.builtin import final_answer, numbers
from rollstream.producers.evaluators.table import check, check_references, reward_of
from rollstream.producers.rollout import rewards
from rollstream.producers.rollout.registry import register_environment, register_reward
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import MODELS, NumericMatch, PythonScore, is_pure
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.events.recorded import (
    RecordedMember,
    RecordedReward,
    RecordedRollout,
    RecordedStep,
    RecordedTokens,
)
from rollstream.schemas.permissions import Permissions, named_by
from rollstream.schemas.settings import RolloutSettings
from tests.producers.conftest import answers, task_of


def step(index, event_type, output, agent="agent"):
    return StepRecorded(
        run_id="r", time_ms=1, group_id="r/g", rollout_id="r/g/m0/a0", step_index=index, agent=agent,
        event_type=event_type, uuid="u", data={"output": output},
    )  # fmt: skip


def rollout(response: Any = "", steps=None, **inputs):
    """A rollout whose agent said `response` last."""
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": response})
    steps = (step(0, "LLM_END", response),) if steps is None else steps
    return rewards.FinishedRollout(inputs, 1, steps, (), {"agent": messages}, "done")


def check_own(block, env):
    """An evaluator of the user's own file."""
    settings = RolloutSettings(environment="none", evaluators={"e": block})
    return check("e", block, Permissions.of(named_by(settings), env))


def score(block, *args, **inputs):
    """Score that an evaluator gives to a response."""
    settings = RolloutSettings(environment="none", evaluators={"e": block})
    chosen = reward_of("e", settings, Permissions.of(named_by(settings), {}), None)
    return asyncio.run(rewards.evaluate(chosen.location, chosen.function, rollout(*args, **inputs)))[None]


@pytest.mark.parametrize(
    ("options", "response", "answer", "wanted"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({"ignore_case": True}, "PARIS", "Paris", 1),
        ({"whitespace": "exact"}, "Paris ", "Paris", 0),
        ({}, "New  York", "New York", 0),
        ({"whitespace": "collapse"}, " New \n York ", "New York", 1),
        ({}, "42", 42, 1),
        ({}, "true", True, 1),
        ({}, "", "", 1),
    ],
)
def test_exact_match_compares_with_the_answer(options, response, answer, wanted):
    for name in ("exact_match", "rollstream_exact_match"):
        assert score({"_type": name} | options, response, answer=answer) == wanted


def test_the_answer_may_have_another_key():
    assert score({"_type": "exact_match", "answer_key": "capital"}, "Paris", capital="Paris") == 1
    with pytest.raises(
        rewards.RewardError, match=r"eval\.evaluators\.e\.answer_key: .*no key 'answer'; name one of: capital"
    ):
        score({"_type": "exact_match"}, "Paris", capital="Paris")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3 and -4.5, then 1,234.5.", [3, -4.5, 1234.5]),
        ("5-3 = 2", [5, 3, 2]),
        ("x=-3", [-3]),
        ("(2)-1", [2, 1]),
        ("1e3 or .5 or 7.", [1000, 0.5, 7]),
        ("1,23 and 1,2345", [1, 23, 1, 2345]),
        ("\N{MINUS SIGN}8 %", [-8]),
        ("-$5.20 and $7", [-5.2, 7]),
        ("1e99999 and 0e99999 and 1e-99999", [0, 0]),
        ("9" * 10_001, []),
        ("none", []),
    ],
)
def test_numbers_are_read_as_people_write_them(text, found):
    assert [float(number) for number in numbers(text)] == found


@pytest.mark.parametrize(
    ("options", "response", "answer", "wanted"),
    [
        ({}, "2 + 2 = 4", 4, 1),
        ({}, "4 is 2 + 2", 4, 0),
        ({"take": "first"}, "4 is 2 + 2", "4", 1),
        ({"take": "only"}, "4 is 2 + 2", 4, 0),
        ({"take": "only"}, "4.0", 4, 1),
        ({}, "3.1416", 3.14159, 0),
        ({"tolerance": 0.001}, "3.1416", 3.14159, 1),
        ({}, "1,000", "#### 1000", 1),
        ({}, "72", "48 / 2 = 24, so 48 + 24 = 72 clips\n#### 72", 1),
        ({}, "24", "48 / 2 = 24, so 48 + 24 = 72 clips\n#### 72", 0),
        ({}, "12345678901234567891", 12345678901234567890, 0),
        ({"tolerance": 0.1}, "1.1", 1.0, 1),
        ({"tolerance": 0.1}, "1.1001", 1.0, 0),
        ({}, "9" * 400, "9" * 400, 1),
        ({}, "1e-10000", "1e10000", 0),
        ({}, "no idea", 4, 0),
        ({}, "", 4, 0),
    ],
)
def test_numeric_match_compares_one_number(options, response, answer, wanted):
    assert score({"_type": "numeric_match"} | options, response, answer=answer) == wanted


@pytest.mark.parametrize(("answer", "found"), [("none", "no number"), (True, "no number"), ("1/2", "2 numbers")])
def test_an_answer_without_a_number_or_with_several_is_an_error_that_names_the_path(answer, found):
    with pytest.raises(rewards.RewardError, match=rf"eval\.evaluators\.e\.answer_key: .* contains {found}"):
        score({"_type": "numeric_match"}, "4", answer=answer)


@pytest.mark.parametrize(
    ("options", "response", "wanted"),
    [
        ({"pattern": r"^\d+$"}, "42", 1),
        ({"pattern": r"^\d+$"}, "42!", 0),
        ({"pattern": r"\d+", "answer_key": "answer"}, "it is 42", 1),
        ({"pattern": r"(\d+) of (?P<all>\d+)", "group": 1, "answer_key": "answer"}, "42 of 99", 1),
        ({"pattern": r"(\d+) of (?P<all>\d+)", "group": "all", "answer_key": "answer"}, "42 of 99", 0),
        ({"pattern": r"(\d+)?x", "group": 1, "answer_key": "answer"}, "x", 0),
        ({"pattern": "A(.*)", "group": 1, "answer_key": "answer", "ignore_case": True}, "a 42 ", 1),
    ],
)
def test_regex_matches_and_may_compare_a_group(options, response, wanted):
    assert score({"_type": "regex"} | options, response, answer="42") == wanted


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"_type": "regex", "pattern": "(a+)+$"}, r"e\.pattern: \"\(a.* takes more than 1 s of CPU time"),
        ({"_type": "regex", "pattern": "(" * 5000 + ")" * 5000}, r"e\.pattern: .* is not a valid regular expression"),
        ({"_type": "regex", "pattern": "a", "group": "b"}, r"e\.pattern: \"a\" has no group 'b'"),
        ({"_type": "json_schema", "schema": {"type": "objekt"}}, r"e\.schema \$\.type: "),
    ],
)
def test_a_pattern_of_a_record_that_cannot_be_matched_fails_the_rollout_alone(block, message):
    settings = RolloutSettings(environment="arithmetic", rewards=("e",), evaluators={"e": block})
    assert refusal(settings, Permissions.of(named_by(settings), {})) is None
    with pytest.raises(rewards.RewardError, match=message):
        score(block, "a" * 40 + "b")


SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ('{"city": "Paris"}', 1),
        ('```json\n{"city": "Paris"}\n```', 1),
        ('{"city": 1}', 0),
        ('Sure! {"city": "Paris"}', 0),
        ("", 0),
        ("[" * 5000, 0),
        ('{"city": "Paris"} or so', 0),
        ('{"city": "Paris", "degrees": NaN}', 0),
    ],
)
def test_json_schema_accepts_what_fits(response, wanted, tmp_path):
    assert score({"_type": "json_schema", "schema": SCHEMA}, response) == wanted
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert score({"_type": "json_schema", "file": str(tmp_path / "schema.json")}, response) == wanted


def test_the_file_of_a_schema_may_be_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert score({"_type": "json_schema", "file": "~/schema.json"}, '{"city": "Paris"}') == 1


def test_a_schema_is_never_fetched():
    block = {"_type": "json_schema", "schema": {"$ref": "http://127.0.0.1:9/schema.json"}}
    with pytest.raises(rewards.RewardError, match=r"eval\.evaluators\.e\.schema raised .*127\.0\.0\.1:9"):
        score(block, "{}")


def test_a_python_function_sees_the_rollout(tmp_path, monkeypatch):
    (tmp_path / "own_scores.py").write_text(
        "def length(rollout):\n    return len(rollout.messages['agent'][-1]['content'])\n"
        "async def by_agent(rollout):\n    return {'agent': 0.5}\n"
        "def broken(rollout):\n    raise KeyError('x')\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("own_scores.length", "python:own_scores.length"):
        assert score({"_type": "python", "function": path}, "four") == 4
    with pytest.raises(
        rewards.RewardError,
        match=r"reward eval\.evaluators\.e raised KeyError \(own_scores\.py line 6, in broken\): 'x'",
    ):
        score({"_type": "python", "function": "own_scores.broken"}, "four")
    for name, words in [("lengths", "did you mean length"), ("number", "is a int")]:
        with pytest.raises(ConfigError, match=rf"eval\.evaluators\.e\.function: .*{words}"):
            check_own({"_type": "python", "function": f"own_scores.{name}"}, {})


WRONG = [
    (
        {"_type": "rouge"},
        r"eval\.evaluators\.e\._type: 'rouge' is not known; known types: exact_match, json_schema, .*regex",
    ),
    ({}, r"e\._type: None is not known"),
    ({"_type": "numeric_match", "tolerence": 1}, r"e\.tolerence: unknown key; did you mean tolerance\?"),
    ({"_type": "numeric_match", "tolerance": -1}, r"e\.tolerance: "),
    ({"_type": "regex", "pattern": "("}, r"e\.pattern is not a valid regular expression"),
    ({"_type": "regex", "pattern": "a", "group": 1}, r"e\.group: the pattern has 0 groups, not 1"),
    ({"_type": "regex", "pattern": "a", "group": "b"}, r"e\.group: the pattern has no group 'b'"),
    (
        {"_type": "regex", "pattern": "(" * 5000 + ")" * 5000},
        r"e\.pattern is not a valid regular expression: maximum recursion",
    ),
    ({"_type": "json_schema"}, r"e\.schema: neither or both of schema and file are given"),
    ({"_type": "json_schema", "schema": {"type": "objekt"}}, r"e\.schema: \$\.type: "),
    ({"_type": "json_schema", "file": "/no/such.json"}, r"e\.file: /no/such\.json cannot be read"),
    ({"_type": "python", "function": "nodots"}, r"e\.function: 'nodots' is not a path; write python:module\.function"),
    ({"_type": "python", "function": "python:a"}, r"e\.function: 'python:a' is not a path; write python:module\.funct"),
    ({"_type": "python", "function": "python:python:a.b"}, r"e\.function: 'python:python:a\.b' is not a path"),
    ({"_type": "llm_judge", "model": "m", "prompt": "{response}"}, r"e\.base_url: field required"),
    ({"_type": "llm_judge", "base_url": "ftp://x", "model": "m", "prompt": "{response}"}, r"e\.base_url: give an http"),
    (
        {"_type": "llm_judge", "base_url": "http://x", "model": "m", "prompt": "x"},
        r"e\.prompt: it must contain \{response\}",
    ),
    (
        {"_type": "llm_judge", "base_url": "http://x", "model": "m", "prompt": "{response}", "min": 3, "max": 1},
        r"e\.min: 3 is not below max 1",
    ),
]


@pytest.mark.parametrize(("block", "reported"), WRONG)
def test_an_error_in_a_block_is_named_by_its_path(block, reported):
    with pytest.raises(ConfigError, match=reported):
        check_own(block, {})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$defs": {"unused": {"$ref": "#/nope"}}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string"}}},
        {"prefixItems": [{}], "items": {"$ref": "#/prefixItems/x"}},
        {"minProperties": 1, "items": {"$ref": "#/minProperties/z"}},
        {"$schema": "http://json-schema.org/draft-03/schema#", "extends": 5, "items": {}},
    ],
)
def test_a_schema_whose_references_are_there_or_unused_is_taken(schema):
    check_references("e", {"_type": "json_schema", "schema": schema}, Permissions.of([], {}))


@pytest.mark.parametrize("name", ["#/$defs/missing", "http://x/y"])
def test_a_reference_that_is_not_in_the_schema_is_refused(name):
    with pytest.raises(ConfigError, match=rf"e\.schema: \$ref '{re.escape(name)}' is not in the schema"):
        check_references("e", {"_type": "json_schema", "schema": {"items": {"$ref": name}}}, Permissions.of([], {}))


def test_variables_are_expanded_and_shown_as_written():
    block = check_own({"_type": "numeric_match", "tolerance": "${TOLERANCE:-0.5}"}, {})
    assert isinstance(block, NumericMatch)
    assert block.tolerance == 0.5
    with pytest.raises(ConfigError) as reported:
        check_own({"_type": "llm_judge", "base_url": "${U}", "model": "m", "prompt": "{response}"}, {"U": "sk-secret"})
    assert "sk-secret" not in str(reported.value)


def test_judges_and_functions_are_not_pure_unless_declared():
    assert {kind for kind in MODELS if kind not in ("python", "llm_judge")} == {
        "exact_match", "numeric_match", "regex", "json_schema",
    }  # fmt: skip
    assert is_pure(check_own({"_type": "exact_match"}, {}))
    assert not is_pure(PythonScore(function="a.b"))
    assert is_pure(PythonScore(function="a.b", pure=True))
    judge = {"_type": "llm_judge", "base_url": "http://x", "model": "m", "prompt": "{response}"}
    assert not is_pure(check_own(judge, {}))


# ---- what is looked at ----


def test_the_result_of_a_workflow_counts_before_the_last_message():
    steps = (step(0, "LLM_END", "thinking"), step(1, "WORKFLOW_END", {"city": "Paris"}))
    assert json.loads(final_answer("e", rollout("thinking", steps))) == {"city": "Paris"}
    assert final_answer("e", rollout("thinking", steps), "agent") == "thinking"


def test_a_workflow_that_returned_null_has_no_score_and_one_whose_result_is_not_recorded_has_the_last_answer():
    steps = (step(0, "LLM_END", "thinking"), step(1, "WORKFLOW_END", None))
    with pytest.raises(rewards.NoScoreError, match="the workflow's result is null; have the workflow return a value"):
        final_answer("e", rollout("thinking", steps))
    assert final_answer("e", rollout("thinking", steps), "agent") == "thinking"
    end = steps[1].model_copy(update={"data": {"input": "q"}})
    assert final_answer("e", rollout("thinking", (steps[0], end))) == "thinking"


def test_an_answer_of_text_parts_is_their_text():
    parts = [{"type": "text", "text": "Par"}, {"type": "text", "text": "is"}]
    assert final_answer("e", rollout(parts)) == "Paris"
    with_image = [*parts, {"type": "image_url", "image_url": {"url": "data:,"}}]
    assert final_answer("e", rollout(with_image, (step(0, "LLM_END", "Paris, shown"),))) == "Paris, shown"


def test_the_agent_that_answered_last_is_scored_unless_one_is_named():
    steps = (step(0, "LLM_END", "first", "ann"), step(1, "LLM_END", "last", "bob"), step(2, "TOOL_END", "x", "bob"))
    found = rewards.FinishedRollout({}, 1, steps, (), {}, "done")
    assert final_answer("e", found) == "last"
    assert final_answer("e", found, "ann") == "first"
    with pytest.raises(rewards.NoScoreError, match="no answer by agent eve"):
        final_answer("e", found, "eve")


def test_a_rollout_without_an_answer_has_no_score():
    with pytest.raises(rewards.NoScoreError, match=r"eval\.evaluators\.e: the rollout has no answer by any agent"):
        score({"_type": "exact_match"}, "", (), answer="x")


# ---- in a rollout ----


@register_environment("test_answers_without_reward")
async def answers_without_reward(session):
    await session.chat([{"role": "user", "content": "?"}])


def attempt(play, **settings):
    inputs = {"answer": "7"}
    return play(task_of("test_answers_without_reward", inputs=inputs, **settings), answers("it is 7"))


def test_an_evaluator_is_a_reward_of_its_name(play):
    played = attempt(play, rewards=("sum",), evaluators={"sum": {"_type": "numeric_match"}})
    played.assert_complete()
    assert [(reward.name, reward.value) for reward in played.rewards] == [("sum", 1.0)]


def test_an_evaluator_comes_before_a_registered_reward_of_its_name(play):
    register_reward("test_shadowed")(lambda rollout: 5.0)
    played = attempt(play, rewards=("test_shadowed",), evaluators={"test_shadowed": {"_type": "exact_match"}})
    assert played.rewards[0].value == 0.0


def test_a_recorded_score_is_not_given_again(play):
    tokens = RecordedTokens.of([1, 2], [3], [-0.5])
    step = RecordedStep(name="m", data={"input": "?", "output": "it is 7"}, tokens=tokens)
    found = RecordedRollout(steps=(step,), rewards=(RecordedReward(value=0.25, name="sum"),))
    members = [RecordedMember(rollout=found).model_dump(mode="json")]
    evaluator = {"sum": {"_type": "numeric_match"}, "other": {"_type": "numeric_match"}}
    inputs = {"recorded": members, "answer": 7}
    played = play(task_of("recorded", inputs=inputs, rewards=("sum", "other"), evaluators=evaluator))
    played.assert_complete()
    assert [(reward.name, reward.value) for reward in played.rewards] == [("sum", 0.25), ("other", 1.0)]
