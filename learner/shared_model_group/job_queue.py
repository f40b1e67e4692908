"""Writes the events that the jobs of one model group need, according to their state on the log: start, examples,
submissions, end.

Every record follows from the JobSubmitted and the state, under an id that a repeat has too. Sent in this order, so that
whoever opens the group later goes on from any point: 1. examples as an artifact, 2. JobSubmitted, 3. JobStarted, 4. of
every batch its tasks, then EpochStarted, 5. once all groups of a batch are closed, its SubmissionReceived.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import put, retrying
from rollstream.eventlog.log import EventLog
from rollstream.eventlog.run_offsets import LETTERS, PARTITIONED, TOPICS, ends_now, start_offsets_of
from rollstream.learner.library_versions import library_versions
from rollstream.learner.shared_model_group import examples, fine_tune_job
from rollstream.learner.shared_model_group.group_view import GroupView, view
from rollstream.learner.shared_model_group.job_lifecycle import FAILURES, FineTuneJob, ModelGroupState
from rollstream.learner.shared_model_group.parameters import JobStateError
from rollstream.schemas import ids
from rollstream.schemas.algorithm_settings import JobKind
from rollstream.schemas.base import Event
from rollstream.schemas.events import JobSkipped, JobSubmitted, ModelSwitched, RunStarted
from rollstream.schemas.events.recorded import RecordedGroup, RecordedMember
from rollstream.schemas.events.weights import FineTune
from rollstream.schemas.settings import ArtifactRef, JobSettings

POLL_S = 0.2
GROUP_KEY = "shared_model_group"
"""Key in the configuration of a run that a group began."""
IDLE_TIMEOUT_S = 30 * 86_400.0
"""Idle timeout of a run that a group begins: its owner may take long between two jobs."""
MAX_INLINE_BYTES = 256 * 1024
"""Maximum size of an example within its task; the rollouts of a larger one are artifacts."""


class JobQueue:
    """The jobs of a model group, in the order of their submission. Open it with `open`."""

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        view: GroupView,
        model_group: str,
        *,
        starts: dict[str, int],
        now_ms: Callable[[], int],
    ) -> None:
        """`starts`: offsets before which there are no records of the run."""
        self._log = log
        self._artifacts = artifacts
        self._view = view
        self._model_group = model_group
        self._run_id = ids.run_of(model_group)
        self._starts = starts
        self._now_ms = now_ms
        self._changing = asyncio.Lock()
        """Held by a submission, skip, retry or cancellation until the state has it: the next one builds on it."""
        self._sent: set[str] = set()
        """Ids of events that were sent for open jobs and are not in the state yet."""

    @classmethod
    async def open(
        cls, log: EventLog, artifacts: ArtifactStore, model_group: str, *, seed: int, now_ms: Callable[[], int]
    ) -> "JobQueue":
        """The jobs of a model group; begins its run, with `seed`, if the log has none.

        Raises JobStateError if the run has ended.
        """
        run_id = ids.run_of(model_group)
        now = await ends_now(log)
        known = await start_offsets_of(log, run_id, (*TOPICS, LETTERS, *PARTITIONED))
        seen = await view(log, model_group, known)
        queue = cls(log, artifacts, seen, model_group, starts=known, now_ms=now_ms)
        try:
            if seen.run_started is None:
                queue._starts = now
                await log.send(await queue._run_started(seed))
                await seen.refresh()
            elif seen.state.run_ended is not None:
                raise JobStateError(f"run {run_id} has ended ({seen.state.run_ended.cause}); begin another run")
        except BaseException:
            await seen.close()
            raise
        return queue

    @property
    def state(self) -> ModelGroupState:
        """State as of the last read."""
        return self._view.state

    def check_run(self) -> None:
        """Raises JobStateError once the run has ended: it takes no further jobs."""
        ended = self.state.run_ended
        if ended is not None:
            raise JobStateError(f"run {self._run_id} has ended ({ended.cause}); open the group in another run")

    async def close(self) -> None:
        """Let go of the log's reader."""
        await self._view.close()

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float | None, otherwise: str) -> None:
        """Go on with the jobs until the state is as wanted.

        Raises TimeoutError, which says `otherwise`, after `timeout_s` seconds; None waits without limit.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        await self.advance()
        while not holds():
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{otherwise} after {timeout_s:g} s")
            await self._view.wait(POLL_S)
            await self.advance()

    async def advance(self) -> ModelGroupState:
        """Read on, and send what is due for open jobs: what their start lacks, batches that are complete, deadlines."""
        state = await self._view.refresh()
        open_jobs = {job.job_id for job in state.queue}
        self._sent = {event_id for event_id in self._sent if any(name in event_id for name in open_jobs)}
        for job in state.queue:
            submitted = job.submitted
            if submitted is None or submitted.fine_tune is None:
                continue
            if job.is_overdue(self._now_ms()):
                cause = f"its deadline of {submitted.fine_tune.deadline_s:g} s has passed"
                await self._log.send_all(fine_tune_job.cancel_events(job, cause, self._now_ms()))
                continue
            await self._start(job, submitted, submitted.fine_tune)
            await self._send_once(fine_tune_job.due_submissions(job))
        return await self._view.refresh()

    async def submit(self, job_id: str, settings: JobSettings, fine_tune: FineTune, check: Callable[[], None]) -> str:
        """Submit a job unless the log has it, behind those that are open; then start it. Raises JobStateError.

        `check` raises the error of a job that is refused; it is called only if the log lacks the job.
        Returns its id: that of a further attempt if the job was skipped when more examples were asked for.
        """
        async with self._changing:
            state = await self._view.refresh()
            if isinstance(state.job(job_id).outcome, JobSkipped):
                fine_tune = fine_tune.model_copy(update={"attempt": fine_tune.attempt + 1})
                job_id = fine_tune_job.job_id_of(self._model_group, settings, fine_tune)
            if state.job(job_id).status == "not_found":
                check()
            await self._submit(job_id, settings, fine_tune)
        await self.advance()
        return job_id

    async def skip(self, job_id: str, kind: JobKind, fine_tune: FineTune, min_examples: int) -> None:
        """Record that there is too little to train on. Raises JobStateError."""
        async with self._changing:
            state = await self._view.refresh()
            self.check_run()
            if state.job(job_id).status == "not_found":
                skipped = JobSkipped(
                    **self._common(job_id),
                    job_kind=kind,
                    num_examples=fine_tune.num_examples,
                    min_examples=min_examples,
                    version=fine_tune.parent_version,
                    name=fine_tune.name,
                )
                await self._log.send(skipped)
            await self._view.refresh()

    async def cancel(self, job_id: str, cause: str) -> None:
        """Cancel a job that is not over."""
        async with self._changing:
            state = await self._view.refresh()
            await self._log.send_all(fine_tune_job.cancel_events(state.job(job_id), cause, self._now_ms()))
            await self._view.refresh()

    async def retry(self, submitted: JobSubmitted, deadline_s: float | None) -> str:
        """A further attempt with its own deadline, from the first batch that no attempt has trained; its id.

        If the newest attempt has neither failed nor been cancelled, it is the one. Raises JobStateError if the run has
        ended.
        """
        before = fine_tune_job.fine_tune_of(submitted)
        async with self._changing:
            state = await self._view.refresh()
            attempts = fine_tune_job.attempts_of(submitted, state.history)
            newest = max(attempts)
            if attempts[newest].status not in FAILURES:
                return attempts[newest].job_id
            first = fine_tune_job.next_batch(submitted, attempts.values())
            changes = {"attempt": newest + 1, "first_batch": first, "deadline_s": deadline_s}
            again = before.model_copy(update=changes)
            settings = submitted.settings.model_copy(update={"num_versions": before.num_batches - first})
            job_id = fine_tune_job.job_id_of(self._model_group, settings, again)
            await self._submit(job_id, settings, again)
        await self.advance()
        return job_id

    async def switch(self, job_id: str, version: int) -> None:
        """Record that the group speaks with the version of a finished job."""
        await self._log.send(ModelSwitched(**self._common(job_id), version=version))
        await self._view.refresh()

    async def stored(self, groups: Sequence[RecordedGroup]) -> ArtifactRef:
        """Examples as an artifact. Raises StoreUnavailableError."""
        lines = b"\n".join(group.model_dump_json(exclude_defaults=True).encode() for group in groups)
        return await put(self._artifacts, lines, ".jsonl", f"store the examples of a job of {self._model_group}")

    async def _submit(self, job_id: str, settings: JobSettings, fine_tune: FineTune) -> None:
        """Send a JobSubmitted unless the log has it, and take it in. Its sender holds `_changing`."""
        self.check_run()
        if self.state.job(job_id).status == "not_found":
            submitted = JobSubmitted(
                **self._common(job_id),
                base_version=self.state.next_base_version,
                settings=settings,
                start_offsets=self._starts,
                fine_tune=fine_tune,
            )
            await self._log.send(submitted)
        await self._view.refresh()

    async def _start(self, job: FineTuneJob, submitted: JobSubmitted, fine_tune: FineTune) -> None:
        """Send what the log lacks of a job's start."""
        missing = [n for n in range(submitted.settings.num_versions) if n not in job.epochs_started]
        if job.is_started and not missing:
            return
        groups = await self._read(fine_tune.data)
        started = fine_tune_job.started_of(submitted, retokenises=examples.needs_tokens(groups))
        groups = [await self._fitting(group) for group in groups]
        await self._log.send_all([] if job.is_started else [started])
        assert self._view.run_started is not None
        for epoch in missing:
            run_seed = self._view.run_started.seed
            *tasks, begun = fine_tune_job.tasks_of(submitted, started, groups, epoch, run_seed=run_seed)
            await self._log.send_all(tasks)
            await self._log.send(begun)

    async def _send_once(self, events: Iterable[Event]) -> None:
        due = [event for event in events if event.event_id not in self._sent]
        await self._log.send_all(due)
        self._sent |= {event.event_id for event in due}

    async def _run_started(self, seed: int) -> RunStarted:
        return RunStarted(
            run_id=self._run_id,
            time_ms=self._now_ms(),
            name=ids.name_of(self._model_group),
            config={GROUP_KEY: ids.name_of(self._model_group)},
            seed=seed,
            dataset=await put(self._artifacts, b"", ".jsonl", f"store the dataset of run {self._run_id}"),
            num_examples=0,
            num_partitions=await self._log.num_partitions("tasks"),
            cluster_id=await self._log.cluster_id(),
            library_versions=library_versions(),
            idle_timeout_s=IDLE_TIMEOUT_S,
        )

    async def _fitting(self, group: RecordedGroup) -> RecordedGroup:
        """The group as it fits into a task: its rollouts by reference if they are large."""
        texts = [member.rollout.model_dump_json().encode() if member.rollout else b"" for member in group.members]
        if sum(map(len, texts)) <= MAX_INLINE_BYTES:
            return group
        doing = f"store the rollouts of {group.example_id}"
        members = [
            RecordedMember(artifact=await put(self._artifacts, text, ".rollout.json", doing)) if text else member
            for member, text in zip(group.members, texts, strict=True)
        ]
        return group.model_copy(update={"members": tuple(members)})

    async def _read(self, data: ArtifactRef) -> list[RecordedGroup]:
        content = await retrying(lambda: self._artifacts.read(data), f"load the examples of {self._model_group}")
        return [RecordedGroup.model_validate(orjson.loads(line)) for line in content.splitlines()]

    def _common(self, job_id: str) -> dict[str, Any]:
        return {
            "run_id": self._run_id,
            "time_ms": self._now_ms(),
            "job_id": job_id,
            "model_group": self._model_group,
        }
