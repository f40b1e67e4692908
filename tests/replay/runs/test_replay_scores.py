"""A run with a KL penalty: its recorded scores are verified, and replays and what-ifs train on them."""

import asyncio
from typing import Any

import pytest
import yaml

from rollstream.harness.replays.what_if import what_if
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.source import RunEvents, of_type, read_run
from rollstream.replay.verify import verify
from rollstream.schemas.events import JobSubmitted, ReferenceScored, StepTrained
from tests.rigs.runs.recorded_run import RecordedRun, hashes_of
from tests.rigs.runs.replay_changes import changes, finders, is_found
from tests.rigs.runs.replay_rig import named, only_difference, tampered, trained, verified


class PenalisedRun(RecordedRun):
    """Each version is held near the base version."""

    num_epochs = 2

    def configuration(self) -> Any:
        written = super().configuration()
        written["trainer_adapters"]["learner"]["algorithm"] = {"name": "grpo", "kl_coefficient": 0.5}
        written["finetuning"]["num_epochs"] = 2
        return written


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("scores")
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(PenalisedRun(folder, folder / "model").record())


def test_every_trajectory_of_a_manifest_is_scored_once(recorded: Any) -> None:
    events = asyncio.run(read_run(recorded.log, "replayed"))
    scored = [event for event, _ in of_type(events.by_topic["weights"], ReferenceScored)]
    assert len({event.trajectory_id for event in scored}) == len(scored) == 16
    assert {event.logprobs for event in scored} == {""}, "a replay holds their digests in memory, not their numbers"
    assert verified(recorded).verdict == trained(recorded).verdict == "equal"
    assert verified(recorded).counts["scores"] == 16


def test_every_row_of_scores_is_true(recorded: Any) -> None:
    expected, untrue = finders(), list[str]()
    tried = [change for change in changes(recorded) if change.kind == "ReferenceScored"]
    tried += [change for change in changes(recorded) if change[:2] == ("StepTrained", "scores_sha256")]
    for change in tried:
        row = expected[change.kind, change.field]
        if not is_found(verified, recorded, change):
            untrue.append(f"{change.kind}.{change.field}: {row}; verify says equal")
        if "train" in row and not is_found(named, recorded, change) and not is_found(trained, recorded, change):
            untrue.append(f"{change.kind}.{change.field}: {row}; train says equal")
    assert untrue == []
    assert {change.field for change in tried} >= {"logprobs", "trajectory_sha256", "version", "term", "scores_sha256"}


def test_a_score_that_is_gone_is_missed_by_name(recorded: Any) -> None:
    run = tampered(recorded)
    run.remove("weights", "reference_scored", 3)
    assert "ReferenceScored of replayed/rl/b000000" in only_difference(verified(run))
    with pytest.raises(Exception, match=r"no ReferenceScored of trajectory .* by its reference"):
        trained(run)


async def asked(run: RecordedRun, changes: Any) -> tuple[RunEvents, RunEvents]:
    """Events of the run, and of a what-if of it."""
    file = run.folder / "what_if.yaml"
    file.write_text(yaml.safe_dump(changes))
    events = await read_run(run.log, "replayed")
    outcome = await what_if(
        run.log, events, run.artifacts, file, checkpoints=run.checkpoints, on_progress=lambda line: None
    )
    return events, await read_run(run.log, outcome.run_id)


def test_a_what_if_trains_on_the_recorded_scores(recorded: Any) -> None:
    before, same = asyncio.run(asked(recorded, {}))
    assert hashes_of(same) == hashes_of(before)
    scored = [event for event, _ in of_type(same.by_topic["weights"], ReferenceScored)]
    assert {event.term for event in scored} == {0}, "none was written by the what-if's learner"
    assert len(scored) == 16
    slower = {"trainer_adapters": {"learner": {"optimizer": {"learning_rate": 1e-3}}}}
    _, other = asyncio.run(asked(recorded, slower))
    scored = [event for event, _ in of_type(other.by_topic["weights"], ReferenceScored)]
    assert {event.term for event in scored} == {0}
    assert all(step.scores_sha256 for step, _ in of_type(other.by_topic["weights"], StepTrained))
    assert not set(hashes_of(other)) & set(hashes_of(before))


def test_a_what_if_by_another_algorithm_has_its_defaults(recorded: Any) -> None:
    _, after = asyncio.run(asked(recorded, {"trainer_adapters": {"learner": {"algorithm": {"name": "gspo"}}}}))
    ((job, _),) = of_type(after.by_topic["jobs"], JobSubmitted)
    algorithm: Any = job.settings.algorithm
    assert (algorithm.name, algorithm.kl_coefficient, algorithm.clip_high) == ("gspo", 0.0, 4e-4)


class PreferenceRun(RecordedRun):
    """Each group's answers are compared with one another, every one with every other."""

    num_epochs = 2

    def configuration(self) -> Any:
        written = super().configuration()
        written["trainer_adapters"]["learner"]["algorithm"] = {"name": "dpo"}
        written["finetuning"]["num_epochs"] = 2
        return written


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("preferences")
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(PreferenceRun(folder, folder / "model").record())


def test_a_what_if_of_fewer_pairs_is_verified_by_the_scores_that_it_was_trained_with(preferences: Any) -> None:
    run = preferences
    assert verified(run).verdict == "equal"
    changes = {"trainer_adapters": {"learner": {"algorithm": {"name": "dpo", "max_pairs_per_turn": 1}}}}

    async def scenario() -> Any:
        before, after = await asked(run, changes)
        pairs = [
            [step.metrics["dpo/pairs"] for step, _ in of_type(events.by_topic["weights"], StepTrained)]
            for events in (before, after)
        ]
        assert pairs == [[12, 12], [2, 2]]
        return await verify(run.log, after, run.artifacts, checkpoints=run.checkpoints)

    report = asyncio.run(scenario())
    assert list(map(str, report.differences)) == []


def test_a_score_of_a_pair_that_is_gone_or_changed_is_a_difference(preferences: Any) -> None:
    gone, changed = tampered(preferences), tampered(preferences)
    gone.remove("weights", "reference_scored", 3)
    changed.change("weights", "reference_scored", b'"logprobs":"', b'"logprobs":"AAAA', nth=3)
    for run in (gone, changed):
        assert "ReferenceScored of replayed/rl/b000000" in only_difference(verified(run))
