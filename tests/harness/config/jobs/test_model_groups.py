"""Runs from a configuration of several model groups: jobs, permissions of services, and errors."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import RunLocation, check_manifests, jobs_of, services_of
from rollstream.harness.runs.preflight import check_paths
from rollstream.harness.runs.sampling_checks import check_engines, check_groups
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import LearnerSettings, ProducerSettings
from rollstream.schemas.settings import ForkPoint

pytestmark = pytest.mark.usefixtures("registered_alone")
AGENTS = {"prover": "provers", "verifier": "verifiers"}


def config_of(written: dict[str, Any], agents: Any = AGENTS, groups: Any = None, **adapter: Any) -> RunConfig:
    written["trajectory_builders"]["b"]["agents"] = agents
    written["trainer_adapters"]["a"] |= adapter | ({} if groups is None else {"model_groups": groups})
    return config_file.resolve(written).config


def test_a_list_of_agents_speaks_through_one_model_group(written: dict[str, Any]) -> None:
    (job,) = jobs_of(config_of(written, ["prover", "verifier"]), "run-1")
    assert (job.job_id, job.model_group, job.plan.tasks_of) == ("run-1/rl", "run-1/policy", "")
    assert job.rollout.agents == {"prover": "run-1/policy", "verifier": "run-1/policy"}


def test_every_trained_model_group_has_a_job_and_the_last_one_plans_the_tasks(written: dict[str, Any]) -> None:
    groups = {"verifiers": {"optimizer": {"learning_rate": 3e-4}, "algorithm": {"name": "grpo", "clip_low": 0.1}}}
    config = config_of(written, groups=groups, optimizer={"learning_rate": 1e-3}, warm_start={})
    jobs = jobs_of(config, "run-1")
    assert [(job.job_id, job.model_group, job.plan.tasks_of) for job in jobs] == [
        ("run-1/sft-verifiers", "run-1/verifiers", "run-1/sft"),
        ("run-1/sft", "run-1/provers", ""),
        ("run-1/rl-verifiers", "run-1/verifiers", "run-1/rl"),
        ("run-1/rl", "run-1/provers", ""),
    ]
    beside, main = jobs[2:]
    assert (beside.job.optimizer.learning_rate, main.job.optimizer.learning_rate) == (3e-4, 1e-3)
    assert beside.job.model == main.job.model
    assert beside.rollout == main.rollout
    assert main.rollout.agents == {"prover": "run-1/provers", "verifier": "run-1/verifiers"}
    check_manifests(jobs)


def test_a_frozen_model_group_has_a_job_that_trains_nothing(written: dict[str, Any]) -> None:
    config = config_of(written, groups={"provers": {"frozen": True, "version": "demo-1a2b3c/old@7"}})
    frozen, main = jobs_of(config, "run-1")
    assert (frozen.job_id, frozen.model_group, frozen.job.kind) == ("run-1/frozen-provers", "run-1/provers", "frozen")
    assert frozen.fork == ForkPoint(run_id="demo-1a2b3c", model_group="old", version=7)
    assert (main.job_id, main.model_group) == ("run-1/rl", "run-1/verifiers")
    assert main.rollout.frozen_agents == ("prover",)
    check_manifests((frozen, main))


def test_the_learner_serves_all_model_groups_and_may_load_their_models(written: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = config_of(written, groups={"verifiers": {"model": {"path": str(other)}}})
    location = RunLocation(KafkaSettings(bootstrap_servers="h:1"), "memory://a", tmp_path)
    learner = services_of(config, location, "run-1")["learner-1"]
    assert isinstance(learner, LearnerSettings)
    assert learner.model_groups == ("run-1/provers", "run-1/verifiers")
    assert {f"model:{other}", f"model:{config.adapter.model.path}"} <= set(learner.allow)


def test_a_model_that_others_serve_has_no_job_and_the_producers_ask_it(written: dict[str, Any], tmp_path: Path) -> None:
    endpoint = {"base_url": "http://h/v1", "model": "m", "api_key_variable": "KEY", "retries": 1}
    for given in (endpoint, "http://h/v1"):
        config = config_of(written, groups={"verifiers": {"endpoint": given}})
        assert [job.model_group for job in jobs_of(config, "run-1")] == ["run-1/provers"]
        location = RunLocation(KafkaSettings(bootstrap_servers="h:1"), "memory://a", tmp_path)
        producers = services_of(config, location, "run-1")["producers-1"]
        assert isinstance(producers, ProducerSettings)
        (group,), (served,) = producers.served_models.keys(), producers.served_models.values()
        assert (group, served.base_url) == ("run-1/verifiers", "http://h/v1")
        assert ProducerSettings.model_validate_json(producers.model_dump_json()) == producers


def test_a_path_of_a_model_group_is_stored_as_written(written: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    config = config_of(written, groups={"verifiers": {"model": {"path": "${MODELS}/tiny"}}})
    assert jobs_of(config, "run-1")[0].job.model.path == "${MODELS}/tiny"


@pytest.mark.parametrize(
    ("agents", "groups", "message"),
    [
        (
            AGENTS,
            {"prover": {}},
            r"prover: no agent .* \(in use: provers, verifiers\); set .*agents to \{AGENT: prover\}",
        ),
        (
            ["prover"],
            {"provers": {}},
            r"model_groups\.provers: no agent .* \(in use: policy\); ",
        ),
        (AGENTS, {"provers": {"version": "r@1", "endpoint": "http://h/v1"}}, r"endpoint: .*remove model and version"),
        (AGENTS, {"provers": {"endpoint": "h:80"}}, r"provers\.endpoint\.base_url: 'h:80' is not a URL"),
        (AGENTS, {"provers": {"endpoint": {"base_url": "http://h", "key": "x"}}}, r"endpoint\.key: unknown key"),
        (AGENTS, {"provers": {"version": "latest"}}, r"provers\.version: write RUN@VERSION"),
        (AGENTS, {"provers": {"frozen": True}, "verifiers": {"frozen": True}}, r"all model groups are frozen"),
        ({"prover": None}, {}, r"agents\.prover"),
        ({"prover": "a/b"}, {}, r"agents\.prover"),
    ],
)
def test_model_groups_that_do_not_fit_are_an_error(
    written: dict[str, Any], agents: Any, groups: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(written, agents, groups)


def test_several_model_groups_need_a_streamed_run(written: dict[str, Any]) -> None:
    written["trainers"]["t"]["planning"] = "submitted"
    with pytest.raises(ConfigError, match=r"several model groups \(provers, verifiers\) need a streamed run"):
        config_of(written)


DORA = {"path": "./model", "lora": {"rank": 8, "target_modules": ["q_proj"], "use_dora": True}}


@pytest.mark.parametrize(
    ("key", "value", "below"),
    [
        ("model", DORA, r"model\.lora\.use_dora: vLLM takes"),
        ("algorithm", {"name": "opd", "teacher": "./nowhere"}, r"algorithm\.teacher: folder \./nowhere"),
        ("algorithm", {"name": "grpo", "temperature": 0.5}, r"algorithm\.temperature: 0\.5 differs"),
        ("algorithm", {"name": "grpo", "truncation_penalty": 0.5}, r"algorithm\.truncation_penalty: groups with"),
    ],
)
def test_an_error_names_the_section_that_gives_a_model_groups_setting(
    written: dict[str, Any], key: str, value: dict[str, Any], below: str
) -> None:
    if key == "model":
        engine = {"kind": "vllm", "executable": sys.executable}
        written["trajectory_builders"]["b"]["engine"] = engine

    def check(**adapter: Any) -> None:
        config = config_of(written, **adapter)
        check_engines(config)
        check_paths(config)
        check_groups(config, config_file.resolve(written).finetune)

    written["workflow"] = {"environment": "guess_number"}
    path = written["trainer_adapters"]["a"]["model"]["path"]
    value = {**value, "path": path} if key == "model" else value
    with pytest.raises(ConfigError, match=rf"^trainer_adapters\.a\.model_groups\.verifiers\.{below}"):
        check(groups={"verifiers": {key: value}})
    with pytest.raises(ConfigError, match=rf"^trainer_adapters\.a\.{below}"):
        check(groups={}, **{key: value})
