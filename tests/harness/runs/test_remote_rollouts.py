"""`--endpoint`: what it makes of a configuration, and that its rollouts are played where it says."""

import json

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.runs.plan import examples_of
from rollstream.harness.runs.preflight import check_names, check_workflow
from rollstream.schemas.errors import ConfigError
from tests.producers.environments.workflow_rig import serving, streaming

URL = "http://127.0.0.1:8000"


@pytest.fixture
def rollout(write, written):
    """Rollout settings of the configuration with changes, under options of the command line."""

    def load(options, builder=None, finetuning=None, adapter=None):
        written["trajectory_builders"]["b"] |= builder or {}
        written["trainer_adapters"]["a"] |= adapter or {}
        written["finetuning"] |= finetuning or {}
        config = config_file.load(write(written), options=options).config
        check_names(config)
        return jobs_of(config, "run-1")[-1].rollout

    return load


def test_an_endpoint_plays_the_rollouts_in_place_of_the_environment(rollout):
    found = rollout(
        {"endpoint": URL, "endpoint_timeout": 200, "result_json_path": "$.answer"},
        builder={"environment_config": {"retokenise": True}, "environment": "arithmetic"},
        finetuning={"target_functions": ["solver"], "target_model": "m"},
    )
    assert found.environment == "remote_workflow"
    assert found.environment_config == {
        "retokenise": True,
        "endpoint": URL,
        "endpoint_timeout": 200.0,
        "target_functions": ["solver"],
        "target_model": "m",
        "result_json_path": "$.answer",
    }
    assert (found.rollout_timeout_s, found.group_timeout_s, found.policy) == (210.0, 600.0, "model")


def test_time_limits_that_are_set_stay_and_others_fit_a_slow_endpoint(rollout):
    slow = rollout({"endpoint": URL, "endpoint_timeout": 500})
    assert (slow.rollout_timeout_s, slow.group_timeout_s) == (510.0, 1020.0)
    limits = {"rollout_timeout_s": 30, "group_timeout_s": 50}
    fixed = rollout({"endpoint": URL, "endpoint_timeout": 500}, builder=limits)
    assert (fixed.rollout_timeout_s, fixed.group_timeout_s) == (30.0, 50.0)


def test_without_an_endpoint_the_environment_stays_and_only_what_was_made_elsewhere_is_imitated(rollout):
    assert rollout({}).environment == "guess_number"
    assert rollout({}, adapter={"algorithm": {"name": "sft"}}).policy == "model"
    assert rollout({"endpoint": URL}, adapter={"algorithm": {"name": "sft"}}).policy == "demonstration"


def test_an_invalid_endpoint_and_a_run_without_questions_are_refused(rollout, write, written, tmp_path):
    with pytest.raises(ConfigError, match="'localhost' is not a URL"):
        rollout({"endpoint": "localhost"})
    loaded = config_file.load(write(written), options={"endpoint": URL})
    with pytest.raises(ConfigError, match=r"name a dataset with questions \(eval.general.dataset\)"):
        examples_of(loaded.config)
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"id": "x", "question": "1+1"}))
    loaded = config_file.load(write(written), options={"endpoint": URL, "dataset": str(questions)})
    assert examples_of(loaded.config)[0].inputs["question"] == "1+1"


@pytest.mark.parametrize("path", ["/v1/workflow/full", "/generate/full", "/elsewhere"])
def test_a_server_that_runs_no_workflow_is_refused_before_the_run_and_nothing_is_run_for_it(write, written, path):
    with serving(streaming([]), path) as (url, bodies):
        config = config_file.load(write(written), options={"endpoint": f"{url}/generate"}).config
        if path != "/elsewhere":
            check_workflow(config)
        else:
            with pytest.raises(
                ConfigError, match=f"--endpoint {url}/generate: the server returned 404 for /v1/workflow"
            ):
                check_workflow(config)
        assert bodies == []


def test_a_server_whose_url_has_a_password_is_looked_at_too(write, written, monkeypatch):
    with serving(streaming([]), "/elsewhere") as (url, _):
        monkeypatch.setenv("TEST_URL", url.replace("//", "//bot:hunter22@"))
        config = config_file.load(write(written), options={"endpoint": "${TEST_URL}"}).config
        with pytest.raises(ConfigError, match=r"--endpoint \$\{TEST_URL\}: the server returned 404"):
            check_workflow(config)


def test_a_server_that_is_not_reachable_yet_is_only_a_warning(write, written, caplog):
    check_workflow(config_file.load(write(written), options={"endpoint": "http://127.0.0.1:9"}).config)
    assert "--endpoint http://127.0.0.1:9 is not reachable yet" in caplog.text
