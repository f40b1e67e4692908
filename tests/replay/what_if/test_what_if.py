"""A what-if trains recorded rollouts again under other settings, as a run of its own, and makes no rollout."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import orjson
import pytest
import yaml
from click.testing import CliRunner

from rollstream.eventlog.codec import decode
from rollstream.eventlog.kafka import log as kafka_log
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.harness.cli.main import rollstream
from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import forget
from rollstream.harness.replays import run as replays
from rollstream.harness.replays.changed_config import changed
from rollstream.harness.replays.what_if import spec_of, what_if, without_effect
from rollstream.harness.services import workspace
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.source import RunEvents, of_type, read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.errors import ConfigError, EnvironmentRunError
from rollstream.schemas.events import (
    EpochSealed,
    GroupClosed,
    JobStarted,
    JobSubmitted,
    RunContinued,
    RunEnded,
    RunStarted,
    StepTrained,
    TaskRequested,
)
from tests.rigs.runs import replay_rig
from tests.rigs.runs.recorded_run import EPOCHS, RecordedRun, batches_of, hashes_of

REWARD = """
def shortness(rollout):
    return -float(len(rollout.messages["agent"][-1]["content"]))


def untidy(rollout):
    rollout.inputs.setdefault("seen", []).append(rollout.seed)
    return -float(len(rollout.messages["agent"][-1]["content"])) * len(rollout.inputs["seen"])


def same(rollout):
    return 1.0


def sometimes(rollout):
    return None if not rollout.messages["agent"][-1]["content"] else 1.0 + rollout.rewards[0].value


def broken(rollout):
    raise KeyError("x")
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("what-if")
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(RecordedRun(folder, folder / "model").record())


def asked(run, changes, on_progress=lambda line: None):
    """Outcome of a what-if, and what the log says of its run."""
    file = run.folder / "what_if.yaml"
    file.write_text(yaml.safe_dump(changes))

    async def go():
        events = await read_run(run.log, "replayed")
        outcome = await what_if(
            run.log, events, run.artifacts, file, checkpoints=run.checkpoints, on_progress=on_progress
        )
        return outcome, await read_run(run.log, outcome.run_id)

    return asyncio.run(go())


def test_equal_settings_train_the_same_weights_in_a_run_of_their_own(recorded):
    outcome, events = asked(recorded, {})
    before = asyncio.run(read_run(recorded.log, "replayed"))
    assert hashes_of(events) == hashes_of(before)
    assert [batch.members for batch in batches_of(events)] == [batch.members for batch in batches_of(before)]
    assert events.started.parent is not None
    assert events.started.parent.run_id == "replayed"
    assert events.has_ended
    assert not of_type(events.by_topic["groups"], GroupClosed)
    assert not of_type(events.by_topic.get("tasks", ()), TaskRequested)
    assert outcome.num_batches == EPOCHS
    assert outcome.recorded == outcome.trained
    assert "policy/ess" in outcome.trained
    for run, own in ((before, "mismatch/kl"), (events, "drift/kl")):
        (step, _) = of_type(run.by_topic["weights"], StepTrained)[0]
        assert [name for name in ("mismatch/kl", "drift/kl") if name in step.metrics] == [own]


def test_a_record_in_jobs_that_cannot_be_decoded_does_not_end_a_what_if(recorded):
    sent = []

    def spoil(line):
        sent.append(asyncio.ensure_future(recorded.log.send_raw("jobs", key=b"other", value=b"no JSON")))

    outcome, events = asked(recorded, {}, spoil)
    assert sent
    assert outcome.num_batches == EPOCHS
    assert events.has_ended


def runs_and_ends(run):
    """Runs of the log, and how each ended."""

    async def go():
        found = [decode(record).event async for record in read_to_end(run.log, "groups")]
        ends = {event.run_id: event for event in found if isinstance(event, RunEnded)}
        return {event.run_id: ends.get(event.run_id) for event in found if isinstance(event, RunStarted)}

    return asyncio.run(go())


def test_a_what_if_whose_learner_dies_has_ended_with_its_error(recorded, monkeypatch):
    before = runs_and_ends(recorded)
    no_folder = recorded.folder / "no_folder"
    no_folder.write_text("")
    monkeypatch.setattr(recorded, "checkpoints", no_folder)
    with pytest.raises(OSError, match="no_folder"):
        asked(recorded, {})
    ((run_id, ended),) = [one for one in runs_and_ends(recorded).items() if one[0] not in before]
    assert ended is not None, f"{run_id} is open"
    assert ended.cause == "failed"
    assert "no_folder" in ended.message


def test_a_what_if_gives_signs_of_life_from_its_beginning_to_its_end(recorded, monkeypatch):
    (first, _) = of_type(asyncio.run(read_run(recorded.log, "replayed")).by_topic["groups"], RunStarted)[0]
    monkeypatch.setattr(RunEvents, "started", first.model_copy(update={"idle_timeout_s": 0.03}))
    _, events = asked(recorded, {})
    kinds = [type(received.event) for received in events.by_topic["groups"]]
    assert kinds[0] is RunStarted
    assert kinds[-1] is RunEnded
    assert kinds.count(RunContinued) >= 2
    assert len(kinds) == kinds.count(RunContinued) + 2


def test_another_learning_rate_trains_other_weights_on_the_same_rollouts(recorded):
    _, events = asked(recorded, {"trainer_adapters": {"learner": {"optimizer": {"learning_rate": 1e-3}}}})
    before = asyncio.run(read_run(recorded.log, "replayed"))
    assert [batch.members for batch in batches_of(events)] == [batch.members for batch in batches_of(before)]
    assert not set(hashes_of(events)) & set(hashes_of(before))


class EarlierRun(RecordedRun):
    """A run from before the newest rules of learner and plan: what its configuration means has changed since."""

    def configuration(self):
        written = super().configuration()
        written["trajectory_builders"]["rollouts"]["sampling"] = {"temperature": 0.7}
        return written

    def spec(self, written):
        spec = super().spec(written)
        algorithm = spec.job.algorithm.model_copy(update={"dual_clip": None, "temperature": 1.0})
        return spec._replace(
            job=spec.job.model_copy(update={"revision": 1, "algorithm": algorithm}),
            plan=spec.plan.model_copy(update={"knows_single_group": False}),
        )


def submitted(events):
    ((job, _),) = of_type(events.by_topic["jobs"], JobSubmitted)
    return job.settings.model_dump()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(EarlierRun(folder, folder / "model").record())


@pytest.mark.parametrize(
    ("learner", "changed"),
    [
        ({}, {}),
        ({"optimizer": {"learning_rate": 1e-3}}, {("optimizer", "learning_rate"): 1e-3}),
        ({"algorithm": {"dual_clip": 3.0}}, {("algorithm", "dual_clip"): 3.0}),
        ({"algorithm": {"temperature": 0.7}}, {("algorithm", "temperature"): 0.7}),
    ],
    ids=["nothing", "learning rate", "what is the default by now", "what is derived by now"],
)
def test_a_what_if_of_an_earlier_run_changes_the_keys_of_its_file_and_nothing_else(earlier, learner, changed):
    _, events = asked(earlier, {"trainer_adapters": {"learner": learner}})
    before = asyncio.run(read_run(earlier.log, "replayed"))
    expected = submitted(before)
    for (block, name), value in changed.items():
        expected[block][name] = value
    assert submitted(events) == expected
    assert changed or hashes_of(events) == hashes_of(before)


@pytest.mark.parametrize(
    ("curriculum", "filters_single_group"),
    [({}, False), ({"min_reward_diff": 0.2}, False), ({"enabled": True}, True), ({"filter_single_group": False}, True)],
)
def test_a_single_group_of_an_earlier_run_is_filtered_only_where_the_file_asks_for_it(
    earlier, curriculum, filters_single_group
):
    before = earlier.configuration()
    now = changed(before, {"finetuning": {"curriculum_learning": curriculum}})
    events = asyncio.run(read_run(earlier.log, "replayed"))
    ((started, _),) = of_type(events.by_topic["groups"], JobStarted)
    ((job, _),) = of_type(events.by_topic["jobs"], JobSubmitted)
    spec = spec_of(config_file.resolve(now).config, config_file.resolve(before).config, started, job.settings, "w")
    assert spec.plan.knows_single_group == filters_single_group
    assert spec.plan.curriculum == started.plan.curriculum.model_copy(update=curriculum)
    assert spec.rollout.sampling == started.rollout.sampling
    assert spec.job == job.settings


def test_a_what_if_is_replayed_as_any_run(recorded):
    outcome, events = asked(recorded, {"finetuning": {"num_epochs": 2}})
    assert outcome.num_batches == 2
    assert outcome.recorded == outcome.trained  # of the same epochs
    report = asyncio.run(verify(recorded.log, events, recorded.artifacts, checkpoints=recorded.checkpoints))
    assert report.differences == []
    report = asyncio.run(train(recorded.log, events, recorded.artifacts))
    assert (report.differences, report.counts) == ([], {"training steps": 2})


def test_the_seals_of_a_what_if_follow_from_its_manifests(recorded):
    outcome, _ = asked(recorded, {"finetuning": {"num_epochs": 2}})
    changed = replay_rig.tampered(recorded)
    kept = changed.log._store._partitions[TopicPartition("batches", 0)]
    numbers = [number for number, one in enumerate(kept.records) if is_seal(one, outcome.run_id)]
    for name, value in {
        "num_trained_groups": 3,
        "num_batches": 2,
        "next_batch_index": 9,
        "filtered_avg_reward": 0.25,
        "is_last": False,
    }.items():
        record = kept.records[numbers[-1]]
        body = orjson.loads(record.value)
        kept.records[numbers[-1]] = replace(record, value=orjson.dumps({**body, name: value}))
        report = asyncio.run(seals_of(changed, outcome.run_id))
        assert [one.what.partition(": ")[2] for one in report.differences] == [name]
        kept.records[numbers[-1]] = record
    report = asyncio.run(seals_of(changed, outcome.run_id))
    assert (report.differences, report.counts["fields of seals"]) == ([], 9)


def is_seal(record, run_id):
    event = decode(record).event
    return isinstance(event, EpochSealed) and event.run_id == run_id


async def seals_of(run, run_id):
    return await verify(run.log, await read_run(run.log, run_id), run.artifacts, checkpoints=run.checkpoints)


@pytest.mark.parametrize("name", ["shortness", "untidy"])
def test_another_reward_function_sees_what_was_recorded(recorded, monkeypatch, name):
    (recorded.folder / "what_if_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(recorded.folder)
    weights = {"task": 0.0}
    builder = {"rewards": [f"python:what_if_reward.{name}"], "reward_weights": weights}
    _, events = asked(recorded, {"trajectory_builders": {"rollouts": builder}})
    assert [member.reward for member in batches_of(events)[0].members] == [0.0, -1.0, -2.0, -3.0] * 2


def test_other_weights_of_recorded_rewards_need_no_function(recorded):
    _, events = asked(recorded, {"trajectory_builders": {"rollouts": {"reward_weights": {"task": -2.0}}}})
    assert [member.reward for member in batches_of(events)[0].members] == [0.0, -2.0, -4.0, -6.0] * 2


def test_repeated_records_of_an_attempt_change_no_reward(recorded):
    for kind in ("step_recorded", "rollout_ended"):
        records, index = recorded.find("steps", kind, 3)
        kept = records[index]
        asyncio.run(recorded.log.send_raw("steps", key=kept.key, value=kept.value))
    _, events = asked(recorded, {"trajectory_builders": {"rollouts": {"reward_weights": {"task": 2.0}}}})
    assert [member.reward for member in batches_of(events)[0].members] == [0.0, 2.0, 4.0, 6.0] * 2


def test_a_rollout_without_a_score_is_rejected_where_the_file_asks_for_it(recorded, monkeypatch):
    (recorded.folder / "what_if_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(recorded.folder)
    builder = {"rewards": ["python:what_if_reward.sometimes"], "reward_weights": {"task": 0.0}, "min_generations": 2}
    with pytest.raises(EnvironmentRunError, match=r"sometimes gave no score \(None\); return a number"):
        asked(recorded, {"trajectory_builders": {"rollouts": builder}})
    _, events = asked(recorded, {"trajectory_builders": {"rollouts": {**builder, "missing_score": "reject"}}})
    assert [member.reward for member in batches_of(events)[0].members] == [2.0, 3.0, 4.0] * 2
    builder |= {"missing_score": "reject", "min_generations": 4}
    with pytest.raises(ConfigError, match=r"nothing is left to train \(6 no_score, 18 not_viable"):
        asked(recorded, {"trajectory_builders": {"rollouts": builder}})


def test_a_reward_that_leaves_nothing_to_train_or_fails_is_an_error(recorded, monkeypatch):
    (recorded.folder / "what_if_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(recorded.folder)
    builder = {"rewards": ["python:what_if_reward.same"], "reward_weights": {"task": 0.0}}
    with pytest.raises(ConfigError, match=r"nothing is left to train \(24 zero_variance"):
        asked(recorded, {"trajectory_builders": {"rollouts": builder}})
    builder["rewards"] = ["python:what_if_reward.broken"]
    with pytest.raises(EnvironmentRunError, match=r"reward python:what_if_reward\.broken raised KeyError"):
        asked(recorded, {"trajectory_builders": {"rollouts": builder}})


def test_a_changed_curriculum_of_a_streamed_run_filters_its_groups(recorded):
    curriculum = {"enabled": True, "initial_percentile": 0.5, "min_reward_diff": 0.0}
    before = asyncio.run(read_run(recorded.log, "replayed"))
    ((job, _),) = of_type(before.by_topic["groups"], JobStarted)
    assert job.plan.curriculum.steer
    outcome, events = asked(recorded, {"finetuning": {"curriculum_learning": curriculum}})
    assert outcome.rejected["curriculum"] > 0
    trained, all_of_them = (sum(len(batch.members) for batch in batches_of(one)) for one in (events, before))
    assert 0 < trained < all_of_them
    report = asyncio.run(verify(recorded.log, events, recorded.artifacts, checkpoints=recorded.checkpoints))
    assert report.differences == []
    with pytest.raises(ConfigError, match=r"steer: a what-if requests no tasks, so .*; leave steer out"):
        asked(recorded, {"finetuning": {"curriculum_learning": {**curriculum, "steer": True}}})


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"trajectory_builders": {"rollouts": {"num_generations": 8}}}, "num_generations cannot change"),
        ({"trainer_adapters": {"learner": {"max_staleness": 2}}}, "max_staleness can only be tightened"),
        ({"finetuning": {"num_epochs": 9}}, "num_epochs cannot change"),
        ({"trajectory_builders": {"rollouts": {"max_turns": 3}}}, "max_turns cannot change"),
        ({"trainer_adapters": {"learner": {"seed": 3}}}, "seed cannot change"),
        ({"trainer_adapters": {"learner": {"warm_start": {"num_epochs": 2}}}}, "warm_start cannot change"),
        ({"trainer_adapters": {"learner": {"model": {"lora": {"rank": 2}}}}}, "does not fit: it has full weights"),
        (
            {"trainer_adapters": {"learner": {"algorithm": {"name": "gdpo"}}}}
            | {"trajectory_builders": {"rollouts": {"reward_weights": {"task": 2.0}}}},
            "reward_weights cannot change in a what-if with algorithm gdpo, which reads the recorded rewards by name",
        ),
        (
            {"trainer_adapters": {"learner": {"algorithm": {"advantage": "gdpo"}}}}
            | {"trajectory_builders": {"rollouts": {"rewards": ["python:tests.rigs.never_imported.reward"]}}},
            "rewards cannot change in a what-if with algorithm grpo",
        ),
        ({"trajectory_builders": {"rollouts": {"nonsense": 3}}}, "nonsense"),
        (
            {"eval": {"evaluators": {"judge": {"api_key": "sk-1"}}}},
            "what_if.yaml: .*api_key: secrets are",
        ),
        ({"trainer_adapters": {"learner": {"optimizer": {"eps": 2**64}}}}, "eps: is .*; give a number of at most 64"),
    ],
)
def test_changes_that_need_other_rollouts_or_cannot_be_stored_are_refused(recorded, changes, reported):
    with pytest.raises(ConfigError, match=reported):
        asked(recorded, changes)


def test_changed_keys_without_an_effect_on_a_what_if_are_printed(recorded, monkeypatch, tmp_path):
    learner = {"optimizer": {"learning_rate": 1e-3}, "artifact_uri": "elsewhere", "warm_start": None}
    changes = {"trainer_adapters": {"learner": learner}}
    changes["trajectory_builders"] = {"rollouts": {"num_partitions": 5, "num_generations": 4}}
    changes["finetuning"] = {"curriculum_learning": {"explore_share": 0.5, "min_reward_diff": 0.1}}
    file = tmp_path / "what_if.yaml"
    file.write_text(yaml.safe_dump(changes, sort_keys=False))
    monkeypatch.setattr(workspace, "broker_of", lambda *_: nullcontext(None))
    monkeypatch.setattr(kafka_log, "KafkaLog", lambda *_, **__: nullcontext(recorded.log))
    monkeypatch.setattr(replays, "ArtifactStore", lambda _: recorded.artifacts)
    options = ["--bootstrap_servers", "localhost:1", "--workspace", str(tmp_path), "--trust", "--what-if", str(file)]
    result = CliRunner().invoke(rollstream, ["replay", "replayed", *options], catch_exceptions=False)
    named = [one.partition(": accepted")[0] for one in result.output.splitlines() if "accepted, but ignored" in one]
    assert named == [
        "trainer_adapters.learner.artifact_uri",
        "trajectory_builders.rollouts.num_partitions",
        "finetuning.curriculum_learning.explore_share",
    ]


@pytest.mark.parametrize(("rate", "is_unchanged"), [(1e-2, True), (5e-3, False)])
def test_a_file_that_changes_no_setting_is_reported(recorded, rate, is_unchanged, caplog):
    forget()
    asked(recorded, {"trainer_adapters": {"learner": {"optimizer": {"learning_rate": rate}}}})
    assert any("changes no setting that a what-if uses" in one for one in caplog.messages) == is_unchanged


def test_keys_are_tried_without_warnings_of_the_others(recorded, caplog):
    forget()
    events = asyncio.run(read_run(recorded.log, "replayed"))
    ((job, _),) = of_type(events.by_topic["groups"], JobStarted)
    sorted_curriculum: Any = {"finetuning": {"curriculum_learning": {"enabled": True, "sort_ascending": True}}}
    number_as_true: Any = {"trainer_adapters": {"learner": {"checkpoint_every": True}}}
    for changes in (sorted_curriculum, number_as_true):
        assert list(without_effect(events, job, changes)) == []
    assert caplog.messages == []
