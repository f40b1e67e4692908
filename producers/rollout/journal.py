"""The record of one attempt: gives steps and rewards their indices, emits them, and chains their digests.

Nothing is emitted after `close`, so that whatever an environment still does cannot follow the attempt's last event.
"""

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.log import Encoded, check_event_size
from rollstream.producers.rollout.continuing import RecordedAttempt
from rollstream.schemas import ids
from rollstream.schemas.base import maker_of
from rollstream.schemas.errors import EnvironmentRunError, LogError
from rollstream.schemas.events import (
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    TaskRequested,
)
from rollstream.schemas.events.rollouts import FunctionAncestry, Prefix

Emit = Callable[[Encoded], Awaitable[None]]
"""Sends an event, which is encoded once, where it is checked that a record can hold it."""
Acknowledged = Callable[[], Awaitable[None]]
"""Returns once the log has acknowledged all that was emitted so far."""
LOST_CALL = "lost_call"
"""Name of the step of a call whose producer was killed: a call that repeats it has a step of its own."""
WORKFLOW = "<workflow>"
"""NAT's name of the function that the whole agent is."""

_step, _started, _ended = maker_of(StepRecorded), maker_of(RolloutStarted), maker_of(RolloutEnded)
_URLS = uuid.NAMESPACE_URL.bytes
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def uuid_of(name: str) -> str:
    """`str(uuid.uuid5(uuid.NAMESPACE_URL, name))`, in a third of the time (RFC 9562, section 5.5)."""
    digest = hashlib.sha1(_URLS + name.encode(), usedforsecurity=False).hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{_VARIANT[digest[16]]}{digest[17:20]}-{digest[20:32]}"


class Journal:
    """Events of one attempt, in the order in which they happen."""

    def __init__(
        self,
        task: TaskRequested,
        rollout_id: str,
        emit: Emit,
        clock: Callable[[], int],
        acknowledged: Acknowledged | None = None,
    ) -> None:
        """Without `acknowledged`, what was emitted counts as acknowledged."""
        self.rollout_id = rollout_id
        self.clock = clock
        self.emit_error: BaseException | None = None
        """Exception that `emit` raised; it ends the attempt without a last event."""
        self.refusal: str | None = None
        """Reason why the first event that no record can hold was not emitted."""
        self._is_over = False
        self._emit = emit
        self._acknowledged = acknowledged
        self._ids: dict[str, Any] = {"run_id": task.run_id, "group_id": task.group_id, "rollout_id": rollout_id}
        self._ancestry = FunctionAncestry(function_id=uuid_of(rollout_id), function_name=WORKFLOW)
        self._num_opened = 0
        self._next_index = 0
        self._holes: list[int] = []
        """Indices of steps that began in another process and were never recorded."""
        self._num_rewards = 0
        self._steps: dict[int, StepRecorded] = {}
        self._rewards: dict[int, RewardRecorded] = {}
        self._step_digests: dict[int, str] = {}
        self._reward_digests: dict[int, str] = {}
        self._is_closed = False

    @property
    def steps(self) -> tuple[StepRecorded, ...]:
        """Recorded steps by index."""
        return tuple(self._steps[index] for index in sorted(self._steps))

    @property
    def rewards(self) -> tuple[RewardRecorded, ...]:
        """Recorded rewards by index."""
        return tuple(self._rewards[index] for index in sorted(self._rewards))

    @property
    def num_open(self) -> int:
        """Calls that began and were never recorded."""
        return self._num_opened - len(self._steps) + self._num_rewards - len(self._rewards)

    def is_over(self) -> bool:
        """Whether the attempt has ended, also by its time; not if another process goes on with it."""
        return self._is_over

    def has_step(self, step_index: int) -> bool:
        """Whether a step is recorded."""
        return step_index in self._steps

    def step(self, step_index: int) -> StepRecorded:
        """A step that is recorded."""
        return self._steps[step_index]

    def share_input(self, messages: Any, prefix: Prefix | None) -> None:
        """Replace each of a call's messages by the equal one of the call that it goes on from.

        Each call of a conversation sends all of its messages again, and its step keeps them.
        """
        step = None if prefix is None else self._steps.get(prefix.step_index)
        before: Any = None if step is None else (step.data or {}).get("input")
        if not isinstance(messages, list) or not isinstance(before, list):
            return
        shared = before[: len(messages)]
        if _are_equal(shared, messages[: len(shared)]):
            messages[: len(shared)] = shared
            return
        messages[: len(shared)] = [
            known if _are_equal(known, message) else message for known, message in zip(shared, messages, strict=False)
        ]

    async def begin(self, *, member: int, attempt: int, seed: int) -> None:
        """Emit RolloutStarted."""
        fields = {"time_ms": self.clock(), "member": member, "attempt": attempt, "seed": seed}
        await self._emit(codec.encode(_started(self._ids | fields)))

    def restore(self, before: RecordedAttempt) -> None:
        """Go on after what another process recorded of this attempt."""
        self._steps = {index: step for index, (step, _) in before.steps.items()}
        self._step_digests = {index: digest for index, (_, digest) in before.steps.items()}
        self._rewards = {index: reward for index, (reward, _) in before.rewards.items()}
        self._reward_digests = {index: digest for index, (_, digest) in before.rewards.items()}
        self._num_opened, self._num_rewards = len(self._steps), len(self._rewards)
        self._next_index = max(self._steps, default=-1) + 1
        self._holes = [index for index in range(self._next_index) if index not in self._steps]
        for _, step in sorted(self._steps.items()):
            if step.llm is not None:
                self.share_input((step.data or {}).get("input"), step.llm.prefix)

    async def fill_holes(self, agent: str) -> None:
        """Record calls that were lost with another process, so that every index has its step."""
        while self._holes:
            fields: dict[str, Any] = {"event_type": "CUSTOM_END", "name": LOST_CALL}
            self._check_open()
            self._num_opened += 1
            await self.record_step(self._holes.pop(0), began_ms=self.clock(), agent=agent, **fields)

    def open_step(self) -> int:
        """Index of a step that begins now. Calls are numbered as they begin, however long each takes.

        It is above those of all recorded steps, also of another process: a call goes on from earlier indices only.
        """
        self._check_open()
        self._num_opened += 1
        self._next_index += 1
        return self._next_index - 1

    async def record_step(self, step_index: int, *, began_ms: int, **fields: Any) -> StepRecorded:
        """Emit what happened at an opened step. `fields` are those of StepRecorded beside ids and event time, of its
        types.

        The step's own uuid, ancestry and times are made here unless they are among them.
        """
        time_ms = self.clock()
        content: dict[str, Any] = {
            **self._ids,
            "time_ms": time_ms,
            "step_index": step_index,
            "uuid": fields.get("uuid") or uuid_of(ids.step_id(self.rollout_id, step_index)),
            "function_ancestry": self._ancestry,
            "event_timestamp": time_ms / 1000,
            "span_event_timestamp": began_ms / 1000,
            **fields,
        }
        step = _step(content)
        self._step_digests[step_index] = await self._put(step)
        self._steps[step_index] = step
        return step

    async def record_reward(
        self, *, name: str, value: float, step_index: int | None, agent: str | None, is_score: bool = False
    ) -> None:
        """Emit one reward."""
        self._check_open()
        index = self._num_rewards
        self._num_rewards += 1
        reward = RewardRecorded(
            **self._ids,
            time_ms=self.clock(),
            reward_index=index,
            name=name,
            value=value,
            step_index=step_index,
            agent=agent,
            is_score=is_score,
        )
        self._reward_digests[index] = await self._put(reward)
        self._rewards[index] = reward

    async def acknowledged(self) -> None:
        """Return once the log has acknowledged all that was emitted so far. Raises what a send raised."""
        if self._acknowledged is not None:
            await self._acknowledged()

    def close(self, *, is_over: bool) -> None:
        """Let only `end` and `fail` emit from now on. `is_over`: one of them follows; else another process may
        continue.
        """
        self._is_closed, self._is_over = True, is_over

    async def end(self, stop_reason: str, missing_scores: Mapping[str, str]) -> None:
        """Emit RolloutEnded: counts, the digest over the content of all steps, then all rewards, and missing scores."""
        digests = [found[index] for found in (self._step_digests, self._reward_digests) for index in sorted(found)]
        fields = {
            "time_ms": self.clock(),
            "num_steps": len(self._steps),
            "num_rewards": len(self._rewards),
            "digest": codec.chain(self.rollout_id, digests),
            "stop_reason": stop_reason,
            "missing_scores": dict(missing_scores),
        }
        await self._emit(codec.encode(_ended(self._ids | fields)))

    async def fail(self, cause: str, message: str, *, is_final: bool) -> None:
        """Emit RolloutFailed."""
        event = RolloutFailed(**self._ids, time_ms=self.clock(), cause=cause, message=message, is_final=is_final)
        await self._emit(codec.encode(event))

    async def _put(self, event: StepRecorded | RewardRecorded) -> str:
        """Emit an event; returns its digest."""
        self._check_open()
        encoded = self._encoded(event)
        digest = codec.digest_of(encoded)  # of what is sent: an environment may change what it recorded
        try:
            await self._emit(encoded)
        except Exception as error:
            self.emit_error = error
            raise
        return digest

    def _encoded(self, event: StepRecorded | RewardRecorded) -> Encoded:
        """Raises EnvironmentRunError if no record can hold the event: the environment's fault, not the log's."""
        try:
            encoded = codec.encode(event)
            check_event_size(encoded)
        except (TypeError, ValueError, LogError) as error:
            message = f"{_described(event)} cannot be recorded: {error}"
            self.refusal = self.refusal or message
            raise EnvironmentRunError(message) from error
        return encoded

    def _check_open(self) -> None:
        if self._is_closed:
            raise EnvironmentRunError(f"rollout {self.rollout_id} has ended; record only while it runs")


def _described(event: StepRecorded | RewardRecorded) -> str:
    if isinstance(event, RewardRecorded):
        return f"reward {event.name}"
    return f"step {event.step_index} ({event.event_type} {event.name})"


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are written alike: 1, 1.0 and true are equal only in Python."""
    return one is other or (one == other and orjson.dumps(one) == orjson.dumps(other))
