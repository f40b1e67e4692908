"""Rewards that a file names: evaluators, registered functions, foreign blocks, and the fields that examples need."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import check_builder, forget
from rollstream.harness.config.components import written_of
from rollstream.harness.config.dataset import Example
from rollstream.harness.config.file import read_yaml
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.config.rewards import check_agents, check_examples
from rollstream.harness.runs.plan import examples_of, weighted_as_recorded
from rollstream.harness.runs.preflight import check_datasets, check_names
from rollstream.harness.runs.sampling_checks import check_groups
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import JobStarted
from rollstream.schemas.events.recorded import RecordedMember
from rollstream.schemas.policy_gradient import GdpoSettings
from rollstream.schemas.settings import RolloutSettings

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic_evaluator.yaml"
ENV = {"KEY": "sk-secret-4711"}
JUDGE = {"_type": "llm_judge", "base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key": "${KEY}"}
JUDGE |= {"prompt": "{question} {response}"}


@pytest.fixture
def config(written, tmp_path, monkeypatch):
    """Resolve the small configuration with evaluators and a reward's name."""
    monkeypatch.setenv("KEY", ENV["KEY"])
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "question": "1+1", "answer": 2}\n{"id": "b", "question": "?"}\n')

    def resolve(evaluators, reward=None, **builder):
        written["eval"] = {"general": {"dataset": {"file_path": str(data)}}, "evaluators": evaluators}
        written["finetuning"] |= {"reward_function": {"name": reward}} if reward else {}
        written["trajectory_builders"]["b"] |= builder
        return config_file.resolve(written).config

    return resolve


def rollout(config) -> RolloutSettings:
    return jobs_of(config, "run-1")[-1].rollout


def test_the_named_evaluator_is_carried_by_the_tasks_as_written(config):
    unused = {"sum": {"_type": "numeric_match"}, "form": {"_type": "regex", "pattern": "a"}}
    found = config({**unused, "judged": JUDGE}, "judged")
    check_names(found)
    assert rollout(found).rewards == ("judged",)
    assert rollout(found).evaluators == {"judged": JUDGE}
    assert ENV["KEY"] not in repr(found) + rollout(found).model_dump_json()


def test_builders_name_more_evaluators_and_choose_what_a_missing_score_is(config):
    evaluators = {"sum": {"_type": "numeric_match"}, "form": {"_type": "regex", "pattern": "a"}}
    settings = rollout(config(evaluators, "sum", rewards=["form"], missing_score="reject"))
    assert settings.rewards == ("form", "sum")
    assert set(settings.evaluators) == {"sum", "form"}
    assert settings.missing_score == "reject"


def test_events_without_evaluators_have_no_further_fields(config):
    settings = rollout(config({}))
    assert (settings.missing_score, settings.evaluators) == ("error", {})
    assert {"evaluators", "missing_score"}.isdisjoint(settings.model_dump())


def test_no_score_is_needed_where_no_reward_counts(config, written):
    written["trainer_adapters"]["a"]["algorithm"] = {"name": "sft"}
    assert rollout(config({})).missing_score == "unneeded"


def test_a_foreign_evaluator_is_an_error_only_where_it_is_to_reward(config):
    foreign = {"rag": {"_type": "tunable_rag_evaluator", "llm_name": "x"}}
    check_names(config(foreign))
    with pytest.raises(ConfigError, match=r"evaluators\.rag\._type: 'tunable_rag_evaluator' is not known; known"):
        check_names(config(foreign, "rag"))


def test_an_unknown_name_lists_what_the_file_has(config):
    with pytest.raises(ConfigError, match=r"finetuning\.reward_function\.name: reward 'smu' is unknown.*has: sum"):
        check_names(config({"sum": {"_type": "numeric_match"}}, "smu"))


@pytest.mark.parametrize("services", ["managed", "external"])
def test_an_invalid_evaluator_is_refused_before_the_run_even_if_unused(config, services):
    with pytest.raises(ConfigError, match=r"eval\.evaluators\.sum\.tolerence: unknown key; did you mean tolerance\?"):
        check_names(config({"sum": {"_type": "numeric_match", "tolerence": 1}}, services=services))


@pytest.mark.parametrize("services", ["managed", "external"])
def test_a_new_run_refuses_true_for_a_number_of_an_evaluator(config, services):
    found = config({"sum": {"_type": "numeric_match", "tolerance": True}}, services=services)
    with pytest.raises(ConfigError, match=r"^eval\.evaluators\.sum\.tolerance: is true; give a number$"):
        check_names(found)
    check_names(found, is_new=False)
    check_names(config({"form": {"_type": "regex", "pattern": "a", "ignore_case": True}}, services=services))


def test_a_missing_python_evaluator_is_refused_before_the_run(config):
    block = {"_type": "python", "function": "no_such_module.score"}
    with pytest.raises(ConfigError, match=r"eval\.evaluators\.own\.function: .*no_such_module cannot be imported"):
        check_names(config({"own": block}, "own"))


@pytest.mark.parametrize(
    ("block", "reported"),
    [
        ({"_type": "numeric_match"}, r"eval\.evaluators\.e\.answer_key: example 'b' of dataset .* has no key 'answer'"),
        (
            {"_type": "exact_match", "answer_key": "ansewr"},
            r"answer_key: example 'a' .* its keys are: question, answer",
        ),
        (
            JUDGE | {"prompt": "{question} {response}", "question_key": "q"},
            r"e\.question_key: example 'a' .*no key 'q'",
        ),
    ],
)
def test_a_row_without_the_key_is_named_before_the_run(config, block, reported):
    found = config({"e": block}, "e")
    with pytest.raises(ConfigError, match=reported):
        check_datasets(found, is_new=True)
    check_datasets(found, is_new=False)


@pytest.mark.parametrize(
    ("block", "answer", "reported"),
    [
        ({"_type": "numeric_match"}, "1/2", "the answer '1/2' of the example contains 2 numbers; correct it"),
        ({"_type": "exact_match"}, None, "the answer of the example is null; add it, or leave the example out"),
        (JUDGE | {"prompt": "{answer} {response}"}, None, "the answer of the example is null"),
    ],
)
def test_a_row_whose_answer_can_never_be_scored_is_named_before_the_run(config, tmp_path, block, answer, reported):
    found = config({"e": block, "unused": {"_type": "numeric_match"}}, "e")
    rows = [{"id": "a", "answer": "none" if block["_type"] != "numeric_match" else 2}, {"id": "b", "answer": answer}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=rf"eval\.evaluators\.e\.answer_key: example 'b' of dataset .*: {reported}"):
        check_datasets(found, is_new=True)


def test_rows_need_no_more_than_the_evaluator_looks_at(config):
    for block in (JUDGE, {"_type": "regex", "pattern": "a"}, {"_type": "json_schema", "schema": {}}):
        check_datasets(config({"e": block}, "e"), is_new=True)


def test_an_environments_own_examples_are_looked_at_too(config):
    found = config({"e": {"_type": "numeric_match"}}, "e")
    found = found.model_copy(update={"dataset": None})
    with pytest.raises(ConfigError, match=r"answer_key: example '0' of environment guess_number has no key 'answer'"):
        examples_of(found)


def test_the_example_is_a_configuration_that_runs(monkeypatch):
    monkeypatch.chdir(EXAMPLE.parents[1])
    written = read_yaml(EXAMPLE)
    found = config_file.resolve(written).config
    check_names(found)
    check_datasets(found, is_new=True)
    settings = rollout(found)
    assert settings.rewards == ("sum",)
    assert settings.reward_weights == {"*": 0, "sum": 1}


def test_the_environments_agents_are_checked_before_the_run(config):
    check_names(config({}, environment="tic_tac_toe_self_play", agents=("X", "O")))
    with pytest.raises(ConfigError, match=r"the run has no X, O; set trajectory_builders\.X\.agents: \[X, O\]"):
        check_names(config({}, environment="tic_tac_toe_self_play", agents=("agent",)))


@pytest.mark.parametrize(
    ("chosen", "given", "weights"),
    [
        (None, {}, {}),
        ("sum", {}, {"*": 0, "sum": 1}),
        ("sum", {"reward": 0.5, "form": 2}, {"*": 0, "sum": 1, "reward": 0.5, "form": 2}),
        ("sum", {"sum": 0.2, "*": 1}, {"*": 1, "sum": 0.2}),
        ("environment", {}, {"form": 0}),
        ("environment", {"form": 1}, {"form": 1}),
    ],
)
def test_the_reward_function_is_the_reward_and_others_count_where_they_have_a_weight(config, chosen, given, weights):
    evaluators = {"sum": {"_type": "numeric_match"}, "form": {"_type": "regex", "pattern": "a"}}
    found = config(evaluators, chosen, rewards=["form"], reward_weights=given)
    assert rollout(found).reward_weights == weights
    again = config_file.resolve(written_of(found)).config
    assert rollout(again).reward_weights == weights


@pytest.mark.parametrize(
    ("reward", "own", "weights"),
    [(None, {}, {"form": 2.0}), ("sum", {}, {"*": 0, "sum": 1, "form": 2}), (None, {"form": 0.5}, {"form": 0.5})],
)
def test_an_algorithm_that_adds_rewards_up_by_itself_weighs_them_as_the_run_does(config, written, reward, own, weights):
    adapter = next(iter(written["trainer_adapters"].values()))
    adapter["algorithm"] = {"name": "gdpo"} | ({"reward_weights": own} if own else {})
    found = config(
        {"sum": {"_type": "numeric_match"}, "form": {"_type": "regex", "pattern": "a"}},
        reward,
        rewards=["form"],
        reward_weights={"form": 2.0},
    )
    algorithm = jobs_of(found, "run-1")[-1].job.algorithm
    assert isinstance(algorithm, GdpoSettings)
    assert algorithm.reward_weights == weights
    assert rollout(found).algorithm_weights == ((weights,) if own else ())


def test_recorded_rollouts_keep_the_rewards_that_they_came_with(config):
    assert rollout(config({"sum": {"_type": "numeric_match"}}, "sum", environment="recorded")).reward_weights == {}


def test_a_run_from_before_keeps_weights_group_sizes_and_frozen_agents_that_it_started_with(config):
    (spec,) = jobs_of(config({"sum": {"_type": "numeric_match"}}, "sum"), "run-1")
    recorded = spec.rollout.model_copy(update={"reward_weights": {}, "frozen_agents": ("judge",)})
    started = JobStarted(
        run_id="run-1",
        time_ms=1,
        job_id=spec.job_id,
        model_group=spec.model_group,
        base_version=0,
        plan=spec.plan,
        rollout=recorded,
    )
    new = spec._replace(plan=spec.plan.model_copy(update={"has_recorded_sizes": True}))
    assert weighted_as_recorded(new, started) == spec._replace(rollout=recorded)
    assert weighted_as_recorded(spec, None) is spec


def test_a_weight_of_a_misspelt_reward_is_warned_of(config, caplog):
    evaluators = {"brief": {"_type": "regex", "pattern": "a"}, "graded": {"_type": "numeric_match"}}
    check_names(config(evaluators, rewards=["brief", "graded"], reward_weights={"brief": 0.1, "of_the_code": 1.0}))
    assert "reward_weights" not in caplog.text
    check_names(config(evaluators, rewards=["brief", "graded"], reward_weights={"breef": 0.1}))
    assert "trajectory_builders.b.reward_weights: breef: no reward of the file has this name, and brief" in caplog.text
    assert "did you mean brief?" in caplog.text


@pytest.mark.parametrize("name", ["environment", "*"])
def test_an_evaluator_with_a_name_that_has_another_meaning_is_refused_before_a_new_run(config, name):
    found = config({name: {"_type": "regex", "pattern": "a"}}, name)
    with pytest.raises(ConfigError, match=rf"eval\.evaluators\.{re.escape(name)}: .* give it another name"):
        check_names(found)
    check_names(found, is_new=False)


def test_a_new_run_names_a_reward_once(config):
    found = config({"form": {"_type": "regex", "pattern": "a"}}, rewards=["form", "form"])
    with pytest.raises(ConfigError, match=r"trajectory_builders\.b\.rewards: form is named twice"):
        check_builder(found)


def test_a_new_run_has_an_agent_and_a_seed_that_the_metrics_hold(config, written):
    for none in ([], {}):
        with pytest.raises(ConfigError, match=r"trajectory_builders\.b\.agents: is empty; name at least one"):
            check_builder(config({}, agents=none))
    written["trainer_adapters"]["a"]["seed"] = 2**63
    with pytest.raises(ConfigError, match=r"trainer_adapters\.a\.seed: is 9223372036854775808"):
        check_builder(config({}, agents=["agent"]))
    written["trainer_adapters"]["a"]["seed"] = 2**63 - 1
    check_builder(config({}))


def test_an_evaluator_of_a_new_run_scores_one_of_its_agents(config):
    ghost = {"form": {"_type": "regex", "pattern": "a", "agent": "ghost"}}
    with pytest.raises(ConfigError, match=r"eval\.evaluators\.form\.agent: 'ghost' is not an agent of.*: agent$"):
        check_agents(config(ghost, "form"))
    check_agents(config(ghost, "form", agents=["ghost"]))


def test_agents_outside_are_known_only_by_the_configuration(config, written):
    ghost = {"form": {"_type": "regex", "pattern": "a", "agent": "ghost"}}
    check_agents(config(ghost, "form", environment="gateway"))
    with pytest.raises(ConfigError, match="name one of: a, b"):
        check_agents(config(ghost, "form", agents=["a", "b"]))
    del written["finetuning"]["reward_function"]
    check_agents(config(ghost))


@pytest.mark.parametrize(
    ("environment", "options", "is_refused"),
    [
        ("guess_number", {}, False),
        ("recorded", {}, False),
        ("gateway", {}, True),
        ("gateway", {"demonstrator": "python:os.path.join"}, False),
    ],
)
def test_a_warm_start_needs_a_demonstrator(written, environment, options, is_refused):
    written["trainer_adapters"]["a"]["warm_start"] = {"num_epochs": 1}
    written["trajectory_builders"]["b"] |= {"environment": environment, "environment_config": options}
    loaded = config_file.resolve(written)
    check_groups(loaded.config, loaded.finetune, is_fork=True)
    if not is_refused:
        check_groups(loaded.config, loaded.finetune)
        return
    with pytest.raises(ConfigError, match=r"a\.warm_start: environment gateway has no demonstrator"):
        check_groups(loaded.config, loaded.finetune)


@pytest.mark.parametrize("given", [{}, {"error": "broken"}, {"rewards": [{"value": 1.0}]}, None])
def test_recorded_rollouts_that_nothing_scores_are_refused(config, given):
    member = {"artifact": {"uri": "a", "sha256": "0" * 64, "size_bytes": 1}} if given is None else {"rollout": given}
    examples = [Example("a", {"recorded": [member]})]
    found = config({}, None, environment="recorded")
    if given == {}:
        with pytest.raises(
            ConfigError, match=r"dataset d: no rollout has a reward, and .*b\.rewards is empty; write `traj"
        ):
            check_examples(found, examples, "dataset d")
    else:
        check_examples(found, examples, "dataset d")
    check_examples(found, examples, "dataset d", is_new=False)


def test_recorded_rollouts_are_read_up_to_the_first_reward_that_is_needed(config, written, monkeypatch):
    validate, read = RecordedMember.model_validate, []
    monkeypatch.setattr(RecordedMember, "model_validate", lambda one: read.append(one) or validate(one))
    members = [{"rollout": {"rewards": [{"value": 1.0}]}}, {"rollout": {}}]
    examples = [Example("a", {"recorded": members})]
    check_examples(config({}, None, environment="recorded"), examples, "dataset d")
    assert read == members[:1]
    written["trainer_adapters"]["a"]["algorithm"] = {"name": "sft"}
    check_examples(config({}), examples, "dataset d")
    assert read == members[:1]


@pytest.mark.parametrize(("of_group", "path"), [(False, "a"), (True, r"a\.model_groups\.critic")])
def test_a_context_without_its_key_is_named_by_the_model_group_that_has_it(config, written, of_group, path):
    block = {"algorithm": {"name": "opsd", "context": "It is {nope}."}}
    written["trainer_adapters"]["a"] |= {"model_groups": {"critic": block}} if of_group else block
    agents = {"solver": "solver", "critic": "critic"}
    with pytest.raises(ConfigError, match=rf"^trainer_adapters\.{path}\.algorithm\.context: .* no key 'nope'"):
        check_examples(config({}, None, agents=agents), [Example("x", {"question": "?"})], "dataset d")


@pytest.mark.parametrize(
    ("context", "refused"),
    [
        (
            "{question} is {correct answer}.",
            "{correct answer} would .* rename the key 'correct answer' .* correct_answer$",
        ),
        ("{ref-answer}", "rename the key 'ref-answer' of the examples to a word, such as ref_answer$"),
        ("{ question }", "{ question } would not be filled in: .*; write {question}$"),
        ("{info.answer}", "give what it stands for a key of its own in the examples, or write {info}$"),
        ("{question:.2f}", "{question:.2f} would not be filled in: .*, or write {question}$"),
        ("{question!r}", "{question!r} would not be filled in: .*, or write {question}$"),
        ("${correct answer}", "rename the key 'correct answer' of the examples to a word"),
        (r"{question}: the root is x^{.5}, { }, {question: 1}, \text{question.} and ${HOME:-question.x}", None),
        (r"{question}: put it in \boxed{x + 1}, or as {'a': 1}", None),
    ],
)
def test_a_key_that_a_context_would_not_fill_in_is_refused(config, written, context, refused):
    written["trainer_adapters"]["a"]["algorithm"] = {"name": "opsd", "context": context}
    inputs = {"": "0", "question": "?", "correct answer": "4", "ref-answer": "4", "info": {"answer": "4"}}
    found = config({})
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_examples(found, [Example("x", inputs)], "dataset d")
    check_examples(found, [Example("x", inputs)], "dataset d", is_new=False)


@pytest.mark.parametrize(
    ("algorithm", "is_reported"),
    [
        ({"name": "opsd", "context": "Think twice."}, True),
        ({"name": "opsd", "context": "It is {answer}."}, False),
        ({"name": "opd", "context": "Think twice.", "teacher": "models/large"}, False),
        ({"name": "opd", "context": "It is {the answer}.", "teacher": "models/large"}, True),
    ],
)
def test_a_context_that_is_the_same_for_all_examples_is_reported(config, written, caplog, algorithm, is_reported):
    forget()
    written["trainer_adapters"]["a"]["algorithm"] = algorithm
    check_examples(config({}), [Example("x", {"answer": "4"})], "dataset d")
    assert [one for one in caplog.messages if "refers to no key" in one] == caplog.messages
    assert bool(caplog.messages) == is_reported
