"""The life cycle of fine-tuning jobs: the table of transitions, and the fold in any mixture of partitions."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.eventlog.log import Position, Received
from rollstream.learner.shared_model_group.job_lifecycle import (
    FAILURES,
    OVER,
    PART,
    TRANSITIONS,
    ClosedGroups,
    FineTuneJob,
    JobStatus,
    ModelGroupState,
    evolve,
    initial,
)
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    GroupClosed,
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSkipped,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    ModelSwitched,
    RunEnded,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.events.weights import FineTune
from rollstream.schemas.settings import ArtifactRef, JobSettings, ModelSettings

RUN, GROUP = "run-1", "run-1/provers"
REF = ArtifactRef(uri="x", sha256="0" * 64, size_bytes=1)


def job_id(number: int) -> str:
    return ids.fine_tune_job_id(GROUP, "sft", f"{number:064x}"[::-1])


def common(number: int, time_ms: int = 1) -> dict[str, Any]:
    return {"run_id": RUN, "time_ms": time_ms, "job_id": job_id(number), "model_group": GROUP}


def submitted(number: int, base: int = 0, deadline_s: float | None = None, batches: int = 2) -> JobSubmitted:
    fine_tune = FineTune(
        data_sha256="1" * 64,
        data=REF,
        num_examples=10,
        config_sha256="2" * 64,
        agents=("prover",),
        parent_version=base,
        num_batches=batches,
        batch_size=10,
        deadline_s=deadline_s,
    )
    settings = JobSettings(kind="sft", model=ModelSettings(path="m"), num_versions=batches)
    return JobSubmitted(**common(number), base_version=base, settings=settings, fine_tune=fine_tune)


def planned(number: int, index: int = 0) -> BatchPlanned:
    return BatchPlanned(
        **common(number),
        batch_id=ids.batch_id(job_id(number), index),
        epoch=index,
        index=index,
        trains_at_version=index,
        yields_version=index + 1,
        members=(),
        seed=0,
        curriculum_sha256="0" * 64,
        previous_sha256="0" * 64,
    )


def sealed(number: int, epoch: int) -> EpochSealed:
    return EpochSealed(
        run_id=RUN,
        time_ms=1,
        job_id=job_id(number),
        epoch=epoch,
        is_last=False,
        num_groups=1,
        num_trained_groups=1,
        num_batches=1,
        next_batch_index=epoch + 1,
        avg_reward=None,
        filtered_avg_reward=None,
        zero_variance_groups=0,
        curriculum_percentile=1.0,
        curriculum_sha256="0" * 64,
    )


def closed(number: int, index: int, job: str | None = None, epoch: int = 0) -> GroupClosed:
    name = job or job_id(number)
    return GroupClosed(
        run_id=RUN,
        time_ms=1,
        group_id=ids.group_id(RUN, ids.name_of(name), epoch, index),
        example_id=f"x{index}",
        job_id=name,
        epoch=epoch,
        index=index,
        reason="complete",
        is_viable=True,
        size=1,
        members=(),
    )


def published(version: int, term: int = 1) -> WeightsPublished:
    return WeightsPublished(
        run_id=RUN,
        time_ms=1,
        model_group=GROUP,
        job_id=job_id(0),
        batch_id=None,
        version=version,
        parent=None,
        term=term,
        weights_sha256="0" * 64,
        weights_format="full",
        base_model="m",
        artifact=REF,
    )


def folded(*partitions: list[Event], order: list[int] | None = None) -> ModelGroupState:
    """The fold of records of several partitions, mixed as `order` says."""
    queues = [
        [Received(event, "d", Position(event.TOPIC, 0, offset), 1) for offset, event in enumerate(events)]
        for events in partitions
    ]
    order = order if order is not None else [n for n, queue in enumerate(queues) for _ in queue]
    state = initial(GROUP)
    for number in order:
        state = evolve(state, queues[number].pop(0))
    return state


def test_every_status_is_in_the_table_and_terminal_ones_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(get_args(JobStatus))
    assert {"succeeded", "failed", "cancelled"} == OVER
    assert all(following <= set(TRANSITIONS) for following in TRANSITIONS.values())
    assert {"failed", "cancelled", "not_found"} == FAILURES


def test_an_unknown_job_is_not_found() -> None:
    assert initial(GROUP).job("run-1/nothing").status == "not_found"
    assert initial(GROUP).history == ()


def test_a_job_waits_runs_and_succeeds() -> None:
    steps = [
        submitted(1),
        JobProgressed(**common(1), version=1, percent=50.0),
        JobSucceeded(**common(1), final_version=2),
    ]
    assert [folded(steps[:n]).job(job_id(1)).status for n in range(4)] == [
        "not_found",
        "pending",
        "running",
        "succeeded",
    ]
    assert [folded(steps[:n]).job(job_id(1)).progress for n in range(4)] == [0, 0, 50, 100]
    assert folded(steps).job(job_id(1)).final_version == 2


def test_a_planned_batch_means_that_the_job_runs() -> None:
    assert folded([submitted(1)], [planned(1)]).job(job_id(1)).status == "running"


@pytest.mark.parametrize("later", [JobSucceeded(**common(1), final_version=2), JobFailed(**common(1), error="e")])
def test_the_first_terminal_event_decides(later: Event) -> None:
    job = folded([submitted(1), JobCancelled(**common(1), cause="not wanted"), later]).job(job_id(1))
    assert (job.status, job.error, job.final_version) == ("cancelled", "cancelled: not wanted", None)


def test_too_few_examples_is_an_outcome_that_keeps_the_model() -> None:
    skipped = JobSkipped(**common(1), job_kind="sft", num_examples=3, min_examples=10, version=4)
    job = folded([skipped]).job(job_id(1))
    assert (job.status, job.final_version) == ("succeeded", 4)
    assert job.error == "skipped: 3 examples, at least 10 are needed; the model stays at version 4"


def test_jobs_queue_in_the_order_of_their_submission_and_build_on_each_other() -> None:
    state = folded([submitted(1), submitted(2, base=2, batches=3), JobProgressed(**common(1), version=1, percent=50.0)])
    assert [job.job_id for job in state.queue] == [job_id(1), job_id(2)]
    assert state.next_base_version == 5
    state = folded([submitted(1), JobCancelled(**common(1))], [published(0), published(1)])
    assert (state.queue, state.next_base_version) == ((), 1)
    state = folded([submitted(1), submitted(2, base=2), JobCancelled(**common(1))], [published(0)])
    assert ([job.job_id for job in state.queue], state.next_base_version) == ([job_id(2)], 0)


@pytest.mark.parametrize(
    "reported", [JobSucceeded(**common(1), final_version=2), JobProgressed(**common(1), version=2, percent=100.0)]
)
def test_a_version_that_a_job_reports_counts_before_its_weights_are_read(reported: Event) -> None:
    jobs: list[Event] = [submitted(1), submitted(2, base=2), reported]
    assert folded(jobs, [published(0)]).next_base_version == 4
    assert folded([*jobs, JobCancelled(**common(1)), JobCancelled(**common(2))]).next_base_version == 2


def test_a_switch_counts_from_its_first_record() -> None:
    switches: list[Event] = [ModelSwitched(**common(n), version=n) for n in (1, 2, 1)]
    state = folded(switches)
    assert (state.version, state.switched.job_id if state.switched else "") == (2, job_id(2))


def test_weights_of_a_replaced_learner_do_not_count() -> None:
    claims = [LearnerClaimed(run_id=RUN, time_ms=1, model_group=GROUP, term=term, learner="l") for term in (1, 2)]
    assert folded([*claims, published(0, term=2), published(7, term=1)]).newest_version == 0


def test_a_deadline_counts_from_the_submission() -> None:
    job = folded([submitted(1, deadline_s=2.0)]).job(job_id(1))
    assert [job.is_overdue(now) for now in (2001, 2002)] == [False, True]
    done = folded([submitted(1, deadline_s=2.0), JobCancelled(**common(1))]).job(job_id(1))
    assert not done.is_overdue(10**9)
    assert not folded([submitted(1)]).job(job_id(1)).is_overdue(10**12)


def test_the_end_of_the_run_cancels_the_jobs_that_are_not_over() -> None:
    ended = RunEnded(run_id=RUN, time_ms=9, cause="completed")
    jobs = [submitted(1), submitted(2, base=2), JobSucceeded(**common(1), final_version=2)]
    for order in ([0, 0, 0, 1], [1, 0, 0, 0]):
        state = folded(list(jobs), [ended], order=order)
        assert [job.status for job in state.history] == ["succeeded", "cancelled"]
        assert (state.job(job_id(2)).error, state.queue) == ("cancelled: the run ended", ())
        assert state.job("run-1/nothing").status == "not_found"
    written = JobFailed(**common(2), error="no memory")
    assert folded([*jobs, written], [ended], order=[1, 0, 0, 0, 0]).job(job_id(2)).error == "no memory"


@pytest.mark.parametrize("written", [[], [JobCancelled(**common(1), cause=JobCancelled.BY_END)]], ids=["no", "yes"])
def test_a_job_cancelled_by_the_end_of_its_run_has_the_message_of_the_end(written: list[Event]) -> None:
    ended = RunEnded(run_id=RUN, time_ms=9, cause="failed", message="batch 0 is too large")
    state = folded([submitted(1), *written], [ended])
    assert state.job(job_id(1)).error == "cancelled: the run ended: batch 0 is too large"


def test_other_groups_and_their_jobs_change_nothing() -> None:
    other = {"run_id": RUN, "time_ms": 1, "job_id": "run-1/rl", "model_group": "run-1/policy"}
    records: list[Event] = [
        JobSucceeded(**other, final_version=1),
        closed(0, 0, "run-1/rl"),
        closed(0, 0, "run-1/provers-2-sft-00"),
    ]
    assert folded(records) == initial(GROUP)
    assert folded([RunEnded(run_id="run-2", time_ms=1, cause="completed")]) == initial(GROUP)


def test_closed_groups_of_a_finished_job_are_dropped() -> None:
    cancelled = [submitted(1), JobCancelled(**common(1))]
    for order in ([0, 1, 0], [0, 0, 1], [1, 0, 0]):
        assert folded(list(cancelled), [closed(1, 0)], order=order).job(job_id(1)).closed == ClosedGroups()
    assert list(folded([submitted(1)], [closed(1, 0)]).job(job_id(1)).closed.of(0)) == [closed(1, 0).group_id]


def test_closed_groups_of_a_planned_batch_are_dropped() -> None:
    others = [closed(1, index, epoch=epoch) for epoch in (1, PART) for index in (0, PART)]
    for order in ([0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]):
        found = folded([closed(1, 0), *others], [sealed(1, 0)], order=order).job(job_id(1)).closed
        assert found.of(0) == {}
        assert [list(found.of(epoch).values()) for epoch in (1, PART)] == [others[:2], others[2:]]
    batches: list[Event] = [sealed(1, epoch) for epoch in (0, 1, PART)]
    assert folded([closed(1, 0), *others], batches).job(job_id(1)).closed == ClosedGroups()


def dicts_of(tree: Any) -> dict[int, int]:
    """Number of entries of all dicts in a tree of them, by identity."""
    if not isinstance(tree, Mapping):
        return {}
    found = {id(tree): len(tree)}
    for one in tree.values():
        found |= dicts_of(one)
    return found


@pytest.mark.parametrize(("num_epochs", "size"), [(1, 20 * PART), (20 * PART, 1), (PART // 2, 40)])
def test_a_closed_group_costs_the_same_however_many_are_closed(num_epochs: int, size: int) -> None:
    events = [closed(1, index, epoch=epoch) for epoch in range(num_epochs) for index in range(size)]
    before = folded([*events[:-1]]).job(job_id(1)).closed
    copied = dicts_of(before.having(events[-1])._batches).items() - dicts_of(before._batches).items()
    assert sum(len_ for _, len_ in copied) <= 2 * PART + 2 * 20


JOBS: list[Event] = [
    submitted(1),
    JobProgressed(**common(1), version=1, percent=50.0),
    submitted(2, base=2),
    JobSucceeded(**common(1), final_version=2),
    JobFailed(**common(1), error="late"),
    ModelSwitched(**common(1), version=2),
    JobCancelled(**common(2), cause="not wanted"),
]
WEIGHTS: list[Event] = [
    LearnerClaimed(run_id=RUN, time_ms=1, model_group=GROUP, term=1, learner="l"),
    published(0),
    published(1),
    WeightsLoaded(run_id=RUN, time_ms=1, model_group=GROUP, version=1, engine="e"),
    LearnerClaimed(run_id=RUN, time_ms=1, model_group=GROUP, term=2, learner="m"),
    published(3, term=1),
    published(2, term=2),
]
GROUPS: list[Event] = [closed(1, 0), closed(1, 1), closed(2, 0), RunEnded(run_id=RUN, time_ms=9, cause="completed")]
BATCHES: list[Event] = [planned(1), sealed(1, 0), planned(1, 1), sealed(1, 1), planned(2)]
PARTITIONS = (JOBS, WEIGHTS, GROUPS, BATCHES)


@st.composite
def repeated(draw: st.DrawFn, events: list[Event]) -> list[Event]:
    """The records of a partition with some of them once more, later."""
    found = list(events)
    for at in draw(st.lists(st.integers(0, len(events) - 1), max_size=4)):
        index = draw(st.integers(found.index(events[at]) + 1, len(found)))
        found.insert(index, events[at])
    return found


@given(st.data())
def test_the_state_depends_neither_on_the_mixture_of_partitions_nor_on_repeats(data: st.DataObject) -> None:
    expected = folded(*(list(events) for events in PARTITIONS))
    partitions = [data.draw(repeated(events)) for events in PARTITIONS]
    order = data.draw(st.permutations([n for n, events in enumerate(partitions) for _ in events]))
    found = folded(*partitions, order=order)
    assert _content(found) == _content(expected)


def _content(state: ModelGroupState) -> Any:
    """All of a state but the offsets."""
    jobs = {name: (job.status, job.progress, job.error, job.final_version, job.num_planned, job.sealed, job.closed,
                   job.switched_to, job.submitted) for name, job in state.jobs.items()}  # fmt: skip
    return (
        jobs,
        state.version,
        state.newest_version,
        state.loaded,
        state.run_ended,
        state.queue == (),
        [job.job_id for job in state.history],
    )


EVENTS = [one for one in JOBS if getattr(one, "job_id", None) == job_id(1)] + [BATCHES[0], BATCHES[1]]


@given(st.lists(st.sampled_from(EVENTS)))
def test_a_status_only_changes_by_a_transition_of_the_table(events: list[Event]) -> None:
    state = initial(GROUP)
    statuses: list[JobStatus] = [FineTuneJob(job_id(1)).status]
    events = [submitted(1), *events]
    for offset, event in enumerate(events):
        state = evolve(state, Received(event, "d", Position(event.TOPIC, 0, offset), 1))
        statuses.append(state.job(job_id(1)).status)
    for before, after in pairwise(statuses):
        assert before == after or after in TRANSITIONS[before]
