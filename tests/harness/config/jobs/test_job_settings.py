"""Job settings from a configuration: bounds, temperatures, and rules that a recorded job does not change."""

from typing import Any

import pytest
import torch

from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import check_ranks, forget
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.runs.sampling_checks import check_groups, check_temperature, check_truncation
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, JobSpec

pytestmark = pytest.mark.usefixtures("registered_alone")


def config_of(written: dict[str, Any], *, sampled: float = 1.0, **algorithm: Any) -> RunConfig:
    written["workflow"] = {"environment": "guess_number"}
    written["trajectory_builders"]["b"]["sampling"] = {"temperature": sampled}
    written["trainer_adapters"]["a"]["algorithm"] = algorithm
    return config_file.resolve(written).config


def job_of(written: dict[str, Any], **changes: Any) -> JobSpec:
    (job,) = jobs_of(config_of(written, **changes), "run-1")
    return job


def dual_clip_of(job: JobSettings) -> float | None:
    assert isinstance(job.algorithm, GrpoSettings)
    return job.algorithm.dual_clip


def test_a_new_run_has_a_dual_clip_unless_the_file_sets_another(written: dict[str, Any]) -> None:
    assert dual_clip_of(job_of(written).job) == 3.0
    assert dual_clip_of(job_of(written, dual_clip=None).job) is None
    assert dual_clip_of(job_of(written, dual_clip=5.0).job) == 5.0
    assert "dual_clip" not in job_of(written, name="sft").job.algorithm.model_dump()


def test_a_recorded_job_keeps_the_rules_that_it_was_trained_by(written: dict[str, Any]) -> None:
    job = job_of(written).job
    assert job.revision == NEWEST_REVISION
    recorded = job.model_dump(mode="json")
    del recorded["revision"], recorded["algorithm"]["dual_clip"]
    again = JobSettings.model_validate(recorded)
    assert (again.revision, dual_clip_of(again)) == (1, None)
    assert again.model_dump(mode="json") == recorded


def test_only_a_loss_with_ratios_takes_the_temperature_of_sampling(written: dict[str, Any]) -> None:
    assert job_of(written, sampled=0.7).job.algorithm.temperature == 0.7
    assert job_of(written, sampled=0.7, name="sft").job.algorithm.temperature == 1.0
    assert job_of(written, sampled=0.7, name="dpo").job.algorithm.temperature == 1.0


def test_greedy_rollouts_are_refused_for_grpo_and_fine_for_others(written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trajectory_builders\.b\.sampling\.temperature: 0 decodes greedily"):
        check_temperature(config_of(written, sampled=0))
    check_temperature(config_of(written, sampled=0, name="sft"))


def test_another_temperature_than_that_of_sampling_is_refused(written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer_adapters\.a\.algorithm\.temperature: 1 differs from .*: 0\.5"):
        check_temperature(config_of(written, sampled=0.5, temperature=1.0))
    check_temperature(config_of(written, sampled=0.5, temperature=0.5))
    check_temperature(config_of(written, sampled=0.5, temperature=1.0, name="sft"))


@pytest.mark.parametrize(
    ("plans", "reported"),
    [
        ({}, r"set trajectory_builders\.b\.drop_zero_variance: false, or"),
        (
            {"curriculum": True},
            r"drop_zero_variance: false and finetuning\.curriculum_learning\.min_reward_diff: 0, or",
        ),
        ({"drops": False}, ""),
        ({"drops": False, "curriculum": True}, r"set finetuning\.curriculum_learning\.min_reward_diff: 0, or"),
        ({"drops": False, "curriculum": True, "min_reward_diff": 0}, ""),
    ],
)
def test_a_truncation_penalty_that_comes_after_the_rejection_of_equal_rewards_is_refused(
    written: dict[str, Any], plans: dict[str, Any], reported: str
) -> None:
    written["trainers"]["t"]["planning"] = "stream"
    if "drops" in plans:
        written["trajectory_builders"]["b"]["drop_zero_variance"] = plans["drops"]
    if "curriculum" in plans:
        curriculum = {"enabled": True, "min_reward_diff": plans.get("min_reward_diff", 0.1)}
        written["finetuning"]["curriculum_learning"] = curriculum
    check_truncation(config_of(written))
    check_truncation(config_of(written, truncation_penalty=0.5, name="sft"))
    if not reported:
        check_truncation(config_of(written, truncation_penalty=0.5))
        return
    with pytest.raises(ConfigError, match=rf"algorithm\.truncation_penalty: groups with equal .*{reported}"):
        check_truncation(config_of(written, truncation_penalty=0.5))
    with pytest.raises(ConfigError, match=rf"algorithm\.overlong: groups with equal .*{reported}"):
        check_truncation(config_of(written, overlong={"max_length": 9, "buffer": 3}))


def test_a_truncation_penalty_is_fine_where_all_of_a_batch_is_compared(written: dict[str, Any]) -> None:
    written["trainers"]["t"]["planning"] = "stream"
    check_truncation(config_of(written, truncation_penalty=0.5, advantage="batch_std"))


def test_a_penalty_that_makes_rewards_negative_is_refused_for_max_rl(written: dict[str, Any]) -> None:
    options: list[dict[str, Any]] = [{"truncation_penalty": 0.5}, {"overlong": {"max_length": 9, "buffer": 3}}]
    for option in options:
        for key in ("name", "advantage"):
            chosen: dict[str, Any] = {key: "max_rl"}
            with pytest.raises(ConfigError, match=r"trainer_adapters\.a\.algorithm\..*: makes rewards negative, which"):
                check_truncation(config_of(written, **option, **chosen))
    check_truncation(config_of(written, name="max_rl"))


@pytest.mark.parametrize(("num_tasks", "num_batches", "versions"), [(8, 1, 10), (8, 2, 20), (8, 3, 26), (2, 4, 20)])
def test_a_job_has_as_many_versions_as_its_groups_fill_batches(
    written: dict[str, Any], num_tasks: int, num_batches: int, versions: int
) -> None:
    how = {"tasks_per_epoch": num_tasks, "batches_per_epoch": num_batches}
    written["trainer_adapters"]["a"] |= {**how, "max_staleness": 3, "warm_start": {**how, "num_epochs": 10}}
    written["finetuning"]["num_epochs"] = 10
    jobs = jobs_of(config_of(written), "run-1")
    assert [spec.job.num_versions for spec in jobs] == [versions, versions]


GROUP_RELATIVE = ["group_std", "group_mean", "leave_one_out", "max_rl", "gdpo", "reinforce_pp_baseline", "per_agent"]


def check_one_rollout(written: dict[str, Any], **algorithm: Any) -> None:
    """The checks of a run whose tasks have one rollout."""
    written["workflow"] = {"environment": "guess_number"}
    written["trajectory_builders"]["b"]["num_generations"] = 1
    written["trainer_adapters"]["a"]["algorithm"] = algorithm
    loaded = config_file.resolve(written)
    check_groups(loaded.config, loaded.finetune)


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"advantage": one} for one in [*GROUP_RELATIVE, "group_mean_batch_std"]),
        *({"name": one} for one in ("max_rl", "gdpo")),
        {"name": "reinforce_pp", "advantage": "reinforce_pp_baseline"},
        {"name": "mix", "advantage": "group_std"},
    ],
    ids=str,
)
def test_one_rollout_a_task_is_refused_where_the_rollouts_of_a_task_are_compared(
    written: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    match = r"trajectory_builders\.b\.num_generations: is 1, .*advantage to one of: batch_mean, batch_std, none, rae"
    with pytest.raises(ConfigError, match=match):
        check_one_rollout(written, **algorithm)
    loaded = config_file.resolve(written)
    assert len(jobs_of(loaded.config, "run-1")) == 1, "a recorded run is still read"


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"advantage": one} for one in ("batch_std", "batch_mean", "rae", "none", "hierarchical")),
        *({"name": one} for one in ("grpo", "ppo", "reinforce_pp", "rae", "dpo", "kto", "expert_iteration")),
        {"name": "mix", "ce": 0.5, "advantage": "group_std"},
    ],
    ids=str,
)
def test_one_rollout_a_task_is_enough_for_other_algorithms(written: dict[str, Any], algorithm: dict[str, Any]) -> None:
    check_one_rollout(written, **algorithm)


@pytest.mark.parametrize(
    ("algorithm", "builder", "num_warnings"),
    [
        ({"name": "grpo"}, "rollstream", 1),
        ({"name": "grpo"}, "openpipe_art_traj_builder", 0),
        ({"advantage": "batch_std"}, "rollstream", 0),
        ({"name": "reinforce_pp"}, "rollstream", 0),
        ({"name": "dpo"}, "rollstream", 0),
    ],
)
def test_another_estimator_than_the_default_is_named_in_a_warning(
    written: dict[str, Any],
    algorithm: dict[str, Any],
    builder: str,
    num_warnings: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget()
    written["trajectory_builders"]["b"]["_type"] = builder
    check_one_rollout(written, **algorithm)
    expected = "trainer_adapters.a.algorithm.advantage: batch_std in place of the default group_std, because num_"
    assert sum(one.getMessage().startswith(expected) for one in caplog.records) == num_warnings


@pytest.mark.parametrize(
    ("algorithm", "builder", "remedy"),
    [
        ({}, {"drop_zero_variance": True}, r"b\.drop_zero_variance: false"),
        ({"name": "sft"}, {}, r"b\.drop_zero_variance: false"),
        ({"advantage": "group_std", "step_rewards": "process"}, {}, r"b\.drop_zero_variance: false"),
    ],
)
def test_one_rollout_a_task_is_refused_where_groups_of_equal_rewards_are_rejected(
    written: dict[str, Any], algorithm: dict[str, Any], builder: dict[str, Any], remedy: str
) -> None:
    written["trajectory_builders"]["b"] |= builder
    with pytest.raises(ConfigError, match=rf"num_generations: is 1, so rewards .* rejected; .* set .*{remedy}$"):
        check_one_rollout(written, **algorithm)
    written["trajectory_builders"]["b"]["drop_zero_variance"] = False
    check_one_rollout(written, **algorithm)


@pytest.mark.parametrize("planning", ["stream", "submitted"])
@pytest.mark.parametrize("is_adaptive", [True, False])
def test_one_rollout_a_task_is_refused_where_the_curriculum_wants_rewards_to_differ(
    written: dict[str, Any], planning: str, is_adaptive: bool
) -> None:
    written["trainers"]["t"]["planning"] = planning
    written["finetuning"]["curriculum_learning"] = {"enabled": True, "steer": is_adaptive}
    with pytest.raises(ConfigError, match=r"set finetuning\.curriculum_learning\.min_reward_diff: 0$"):
        check_one_rollout(written)
    check_one_rollout(written, name="dpo")
    written["finetuning"]["curriculum_learning"]["min_reward_diff"] = 0
    check_one_rollout(written)


def of_ranks(written: dict[str, Any], ranks: int, **adapter: Any) -> RunConfig:
    written["workflow"] = {"environment": "guess_number"}
    block = written["trainer_adapters"]["a"]
    model = block["model"] | adapter.pop("model", {})
    block |= {"algorithm": {"name": "grpo"}, "ranks": ranks, **adapter, "model": model}
    return config_file.resolve(written).config


@pytest.mark.parametrize(
    ("adapter", "reported"),
    [
        ({"optimizer": {"kind": "adamw_8bit"}}, "with optimizer.kind: adamw_8bit; set ranks: 1, or change the run"),
        ({"warm_start": {"optimizer": {"kind": "adamw_8bit"}}}, "with optimizer.kind: adamw_8bit"),
        ({"model": {"device": "cuda"}}, r"with model.device: cuda \(auto and cpu are"),
    ],
)
def test_a_run_that_the_learners_processes_would_refuse_does_not_begin(
    written: dict[str, Any], adapter: dict[str, Any], reported: str
) -> None:
    alone, together = of_ranks(written, 1, **adapter), of_ranks(written, 2, **adapter)
    check_ranks(alone, jobs_of(alone, "run"))
    with pytest.raises(ConfigError, match=rf"trainer_adapters\.a\.ranks: 2 processes do not train {reported}"):
        check_ranks(together, jobs_of(together, "run"))


def test_processes_are_refused_beside_fewer_gpus_and_external_services(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of_ranks(written, 3, model={"device": "auto"})
    for num_gpus in (0, 2, 3):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num=num_gpus: num)
        if num_gpus != 2:
            check_ranks(config, jobs_of(config, "run"))
            continue
        with pytest.raises(ConfigError, match="3 processes need a GPU each, and this machine has 2; set ranks: 2, or"):
            check_ranks(config, jobs_of(config, "run"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    on_cpu = of_ranks(written, 3, model={"device": "cpu"})
    check_ranks(on_cpu, jobs_of(on_cpu, "run"))
    external = config.model_copy(update={"builder": config.builder.model_copy(update={"services": "external"})})
    with pytest.raises(ConfigError, match=r"a\.ranks: the learner of this run is started elsewhere"):
        check_ranks(external, ())
