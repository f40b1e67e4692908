"""Limits on the rollouts of a process that run at the same time, and their order: validations first, then the group
that came first. So a group that was started is not kept waiting by those that come after it.

Also limits the groups that are started ahead of the learner: as many as its lag and its speed leave time for.
"""

import asyncio
import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.log import ReadableLog, TopicPartition
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import BatchPlanned, StepTrained, TaskRequested
from rollstream.schemas.services import PaceSettings

Slot = asyncio.Future[None]
"""A requested slot; done once it is granted."""
Turn = tuple[bool, int]
"""A position in the order of groups."""


class Slots:
    """Slots of one process, for use in one event loop."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: list[tuple[Turn, int, Slot]] = []
        self._numbers = itertools.count()

    def next_turn(self, *, is_first: bool = False) -> Turn:
        """A later position in the order than all given before; `is_first`: among those that go first."""
        return (not is_first, next(self._numbers))

    def ask(self, turn: Turn) -> Slot:
        """A slot, granted at once if one is free. It is to be released, granted or not."""
        slot: Slot = asyncio.get_running_loop().create_future()
        if self._num_free:
            self._num_free -= 1
            slot.set_result(None)
        else:
            heapq.heappush(self._waiting, (turn, next(self._numbers), slot))
        return slot

    def release(self, slot: Slot | None) -> None:
        """Pass a slot on to the next in order, or withdraw it if it was not granted. None: does nothing."""
        if slot is None:
            return
        if not slot.done() or slot.cancelled():
            slot.cancel()
            return
        while self._waiting:
            _, _, other = heapq.heappop(self._waiting)
            if not other.done():
                other.set_result(None)
                return
        self._num_free += 1


MAX_JOBS = 1000
"""Maximum number of jobs and model groups whose pace is remembered; the oldest ones are dropped."""
SMOOTHING = 0.3
"""Share of the newest value in a running mean."""
BATCHES, WEIGHTS = TopicPartition("batches", 0), TopicPartition("weights", 0)
IDLE = "wait"
"""The phase of StepTrained in which the learner has nothing to do."""


def allowed_groups(
    *, lag: int, max_staleness: int, group_s: float, train_s: float, groups_per_batch: int
) -> int | None:
    """Groups of a job that may be in progress at once; None: any number.

    `lag`: batches that are planned and not trained, the one in training among them. A learner that has nothing to do
    (lag 0) is given all there is. Else groups are wanted for the `ceil(group_s / train_s)` batches that it trains while
    one group is rolled out (Little's law), but for no more than `max_staleness`, beyond which they would be too old; of
    these batches `lag - 1` are planned already. `group_s`: seconds of a group; `train_s`: of a training step; 0:
    unknown.
    """
    if lag <= 0 or groups_per_batch <= 0:
        return None
    ahead = max(1, math.ceil(group_s / train_s)) if group_s > 0 and train_s > 0 else max_staleness
    return max(0, min(max_staleness, ahead) + 1 - lag) * groups_per_batch


@dataclass(slots=True)
class _Planned:
    """The newest manifest of a job."""

    model_group: str
    version: int
    """Version that it yields."""
    num_groups: int


class Pace:
    """Holds groups back that would be rolled out long before the learner gets to them."""

    def __init__(
        self, settings: PaceSettings | None = None, version: Callable[[str], int] = lambda model_group: -1
    ) -> None:
        """`settings`: None: nothing is held back. `version`: a model group's current version, until the training of one
        is seen.
        """
        self._settings = settings
        self._version = version
        self._planned: dict[str, _Planned] = {}
        self._trained: dict[str, int] = {}
        self._train_s: dict[str, float] = {}
        self._group_s: dict[str, float] = {}
        self._open: dict[str, tuple[str, float]] = {}
        """Job and time of admission by group id; one entry for each group in progress."""
        self._num_open: Counter[str] = Counter()
        """Groups in progress by job."""
        self._held: dict[str, OrderedDict[asyncio.Future[None], str]] = {}
        """Ids of the groups that wait here, in order, by job; each is granted its beginning once it may begin."""

    async def admit(self, task: TaskRequested) -> None:
        """Return once the group may begin; then `leave` is to be called. Validations are never held back."""
        if self._settings is None or task.purpose == "validation":
            return
        if self._may_begin(task.job_id, self._settings):
            self._begin(task.group_id, task.job_id)
            return
        held, granted = self._held.setdefault(task.job_id, OrderedDict()), asyncio.get_running_loop().create_future()
        held[granted] = task.group_id
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                held.pop(granted, None)
            else:  # granted meanwhile: the next one may begin
                self._end(task.group_id)
            self._wake()
            raise

    def leave(self, group_id: str) -> None:
        """The group is settled, or was never admitted."""
        job_id, began_s = self._end(group_id)
        if job_id:
            _mean(self._group_s, job_id, monotonic() - began_s)
            self._wake()

    def retry_after_s(self) -> int | None:
        """Seconds until the learner has probably trained a batch; None if no group is held back."""
        planned = [self._planned[job_id] for job_id in self._held if job_id in self._planned]
        waits_s = [self._train_s.get(one.model_group, 1.0) for one in planned]
        return min(60, max(1, math.ceil(min(waits_s)))) if waits_s else None

    def take(self, event: Event) -> None:
        """Learn of a manifest, or of a step that was trained."""
        if isinstance(event, BatchPlanned):
            num_groups = len({member.group_id for member in event.members})
            before = self._planned.pop(event.job_id, None)
            size = num_groups or (0 if before is None else before.num_groups)
            self._planned[event.job_id] = _Planned(event.model_group, event.yields_version, size)
            _bound(self._planned)
        elif isinstance(event, StepTrained):
            self._trained[event.model_group] = max(event.version, self._trained.get(event.model_group, 0))
            _bound(self._trained)
            busy_s = sum(seconds for phase, seconds in event.seconds.items() if phase != IDLE)
            if busy_s > 0:
                _mean(self._train_s, event.model_group, busy_s)
        self._wake()

    async def follow(self, log: ReadableLog) -> None:
        """Learn what comes from now on, until cancelled. What was planned before is known by the next manifest."""
        starts = {where: (await log.end_offsets(where.topic))[0] for where in (BATCHES, WEIGHTS)}
        reader = await log.reader(starts)
        try:
            while True:
                for record in await reader.poll():
                    try:
                        self.take(codec.decode(record).event)
                    except DecodeError:
                        continue  # its own reader sends it to the dead letters
        finally:
            await reader.close()

    def _may_begin(self, job_id: str, settings: PaceSettings) -> bool:
        planned = self._planned.get(job_id)
        if planned is None:
            return True
        group = planned.model_group
        allowed = allowed_groups(
            lag=planned.version - max(self._trained.get(group, -1), self._version(group)),
            max_staleness=settings.max_staleness,
            group_s=self._group_s.get(job_id, 0.0),
            train_s=self._train_s.get(group, 0.0),
            groups_per_batch=planned.num_groups,
        )
        return allowed is None or self._num_open[job_id] < math.ceil(allowed / settings.num_producers)

    def _begin(self, group_id: str, job_id: str) -> None:
        self._end(group_id)
        self._open[group_id] = job_id, monotonic()
        self._num_open[job_id] += 1

    def _end(self, group_id: str) -> tuple[str, float]:
        """Job and time of admission; no job if the group was not in progress."""
        job_id, began_s = self._open.pop(group_id, ("", 0.0))
        if job_id:
            self._num_open[job_id] -= 1
            if not self._num_open[job_id]:
                del self._num_open[job_id]
        return job_id, began_s

    def _wake(self) -> None:
        """Let as many groups begin as may, of each job in the order in which they came."""
        if self._settings is None:
            return
        for job_id, held in list(self._held.items()):
            while held and self._may_begin(job_id, self._settings):
                granted, group_id = held.popitem(last=False)
                if not granted.done():
                    granted.set_result(None)
                    self._begin(group_id, job_id)
            if not held:
                del self._held[job_id]


def _mean(means: dict[str, float], name: str, value: float) -> None:
    before = means.pop(name, value)
    means[name] = before + SMOOTHING * (value - before)
    _bound(means)


def _bound(found: dict[str, Any]) -> None:
    if len(found) > MAX_JOBS:
        del found[next(iter(found))]
