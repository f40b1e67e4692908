"""All readers of claims and versions agree on what is void: learner, engines, opponents, progress and the tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Position, Received, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.terms import claimed
from rollstream.harness.runs import progress as run_progress
from rollstream.learner import progress as learner_progress
from rollstream.learner import retention
from rollstream.learner.shared_model_group import job_lifecycle
from rollstream.learner.shared_model_group.job_lifecycle import ModelGroupState
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.rows import rows_of
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.producers.league.opponents import _Versions
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import LearnerClaimed, StepTrained, WeightsPublished
from rollstream.schemas.permissions import NOTHING
from rollstream.schemas.settings import ArtifactRef

RUN = "run-1"
JOB = f"{RUN}/rl"
TERMS, VERSIONS = st.integers(0, 3), st.integers(0, 3)
JOBS = st.sampled_from([JOB, f"{RUN}/next"])
CLAIMS = st.tuples(st.just("claimed"), st.integers(1, 3), st.sampled_from(["one", "two"]), st.just(""))
PUBLISHED = st.tuples(st.just("published"), TERMS, VERSIONS, JOBS)
TRAINED = st.tuples(st.just("trained"), TERMS, VERSIONS, JOBS)
HISTORY = st.lists(st.one_of(CLAIMS, PUBLISHED, PUBLISHED, TRAINED), max_size=25)


def events_of(history: Sequence[tuple[str, int, Any, str]], model_group: str) -> list[Event]:
    """The history's events; their hashes tell which term and place they come from."""
    found: list[Event] = []
    for offset, (kind, term, subject, job_id) in enumerate(history):
        sha256 = f"{offset:064x}"
        common = {"run_id": RUN, "time_ms": offset, "model_group": model_group, "term": term}
        if kind == "claimed":
            found.append(LearnerClaimed(**common, learner=subject))
        elif kind == "published":
            artifact = ArtifactRef(uri=f"file:///{sha256}", sha256=sha256, size_bytes=1)
            found.append(
                WeightsPublished(
                    **common, job_id=job_id, batch_id=None, version=subject, parent=None, weights_sha256=sha256,
                    weights_format="full", base_model="tiny", artifact=artifact,
                )
            )  # fmt: skip
        else:
            found.append(
                StepTrained(
                    **common, job_id=job_id, batch_id=f"{job_id}/{subject}", epoch=0, version=subject,
                    weights_sha256=sha256, num_optimizer_steps=1, metrics={},
                )
            )  # fmt: skip
    return found


def first_that_count(events: Sequence[Event]) -> tuple[dict[int, str], dict[int, str], dict[str, dict[int, str]]]:
    """Hash by version of published and of trained weights, by the rule's own words, and of those that a job trained."""
    published: dict[int, str] = {}
    publishers: dict[int, str] = {}
    of_jobs: dict[str, dict[int, str]] = {}
    highest = 0
    for event in events:
        if isinstance(event, LearnerClaimed):
            highest = max(highest, event.term)
        elif isinstance(event, WeightsPublished) and event.term >= highest:
            published.setdefault(event.version, event.weights_sha256)
            publishers.setdefault(event.version, event.job_id)
        elif isinstance(event, StepTrained) and event.term >= highest:
            of_jobs.setdefault(event.job_id, {}).setdefault(event.version, event.weights_sha256)
    trained: dict[int, str] = {}
    for version in {version for found in of_jobs.values() for version in found}:
        own = of_jobs.get(publishers.get(version, ""), {}).get(version)
        # hashes are offsets in hexadecimal, of equal length: the greatest is the last
        trained[version] = own or max(found[version] for found in of_jobs.values() if version in found)
    return published, trained, of_jobs


def received_of(events: Sequence[Event]) -> list[Received]:
    return [
        Received(event, codec.content_digest(event), Position("weights", 0, offset), 0)
        for offset, event in enumerate(events)
    ]


@given(HISTORY)
def test_folds_agree_on_what_is_void(history: list[tuple[str, int, Any, str]]) -> None:
    model_group = ids.model_group(RUN, ids.MODEL_GROUP)
    events = events_of(history, model_group)
    published, trained, of_jobs = first_that_count(events)
    of_learner, needs, progress = (
        learner_progress.LogState(),
        retention.WeightNeeds(),
        run_progress.Progress(RUN),
    )
    follower = WeightFollower(
        MemoryLog(), ArtifactStore("file:///nowhere"), ScriptedEngine(), engine_id="engine-0", permissions=NOTHING
    )
    opponents, shared = _Versions(0), ModelGroupState(model_group)
    for received in received_of(events):
        opponents.take(received.event, received.position.offset)
        shared = job_lifecycle.evolve(shared, received)
        learner_progress.evolve(of_learner, received)
        retention.evolve(needs, received)
        progress = run_progress.evolve(progress, received.event)
        follower._apply(received.event)
    assert {version: f"{offset:064x}" for version, offset in opponents.offsets.items()} == published
    assert shared.newest_version == max(published, default=-1)
    group = of_learner.group(model_group)
    assert {version: event.weights_sha256 for version, event in group.published.items()} == published
    steps = {version: group.step_of(version) for version in group.steps}
    assert {version: step.weights_sha256 for version, step in steps.items() if step is not None} == trained
    assert needs.group(model_group).published == set(published)
    assert progress.version == max(published, default=-1)
    assert (progress.weights and progress.weights.weights_sha256) == published.get(progress.version)
    newest = progress.job(JOB).trained
    of_job = of_jobs.get(JOB, {})
    assert (newest and newest.weights_sha256) == (of_job[max(of_job)] if of_job else None)
    followed = follower._group(model_group).newest
    assert (followed and followed.weights_sha256) == published.get(progress.version)


def test_the_tables_agree_with_the_folds(tmp_path: Path) -> None:
    database = Database(tmp_path / "metrics.duckdb")
    num_histories = 0

    @given(HISTORY)
    @example([("trained", 0, 0, JOB), ("trained", 0, 0, f"{RUN}/next")])
    def agree(history: list[tuple[str, int, Any, str]]) -> None:
        nonlocal num_histories
        num_histories += 1
        model_group = f"{RUN}/group-{num_histories}"
        events = events_of(history, model_group)
        rows: dict[str, list[Any]] = {}
        for received in received_of(events):
            for table, row in rows_of(received):
                rows.setdefault(table, []).append(row)
        database.write(rows, {TopicPartition("weights", 0): num_histories})
        published, trained, _ = first_that_count(events)
        assert shown(database, "weight_versions", model_group) == published
        assert shown(database, "training_steps", model_group) == trained

    try:
        agree()
    finally:
        database.close()


def shown(database: Database, view: str, model_group: str) -> dict[int, str]:
    """Hash by version in a view."""
    rows = database._connection.execute(
        f"SELECT version, weights_sha256 FROM {view} WHERE model_group = ?", [model_group]
    ).fetchall()
    return dict(rows)


@pytest.mark.parametrize("term", [1, 2])
def test_a_claim_of_the_same_or_a_lower_term_changes_nothing(term: int) -> None:
    first, second = (
        LearnerClaimed(run_id=RUN, time_ms=0, model_group="g", term=number, learner=name)
        for number, name in ((2, "one"), (term, "two"))
    )
    owner = claimed(None, first, 5)
    assert claimed(owner, second, 6) == owner
