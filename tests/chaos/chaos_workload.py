"""A seeded workload of raw `steps` records: groups of 8 on 6 partitions, with all that goes wrong with records.

Repeats, records out of order, late ones, poison, attempts that are run again, zombies that go on writing, attempts
that two producers wrote, members that never end, groups that close once enough members are complete. Rewards are
multiples of 1/8, so that any sum of them is exact.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Headers, partition_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    EpochStarted,
    GroupExtended,
    GroupStarted,
    JobStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    RunStarted,
    StepRecorded,
    Tick,
)
from rollstream.schemas.events.rollouts import LLMCall, Prefix, VersionSpan
from rollstream.schemas.settings import PlanSettings, RolloutSettings
from rollstream.schemas.tokens import encode_floats, encode_ids

PARTITIONS = 6
SIZE = 8
MINIMUM = 2
ENOUGH = 5
"""Complete members of an oversampled group, which is every third."""
GROUPS_PER_BATCH = 8
TICK_MS = 10
"""Event time from a record to the next."""
EXTENDED_EVERY = 97
"""Records from one extension of a group's deadline to the next."""
REPEATED, OUT_OF_ORDER, LATE, POISON = 0.05, 0.05, 0.01, 0.01
FATES = {"plain": 84, "rerun": 8, "zombie": 2, "superseded": 2, "lost_for_good": 1, "wrong_digest": 1, "spliced": 1}
FATES |= {"never_ends": 1}
"""Fates of members, with their frequencies."""


@dataclass(frozen=True, slots=True)
class Line:
    """One record to write; without an event it is poison."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    event: Event | None = None


@dataclass(slots=True)
class Workload:
    """Records by partition in the order in which they are written, and the run that they belong to."""

    run_id: str
    seed: int
    num_groups: int
    partitions: list[list[Line]]
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        return sum(map(len, self.partitions))

    def run_events(self, store: ArtifactStore) -> list[Event]:
        """Events that the harness writes to `groups` before the first task: one epoch of many batches."""
        lines = b"\n".join(
            orjson.dumps({"example_id": f"x{index:05d}", "inputs": {}}) for index in range(self.num_groups)
        )
        common = {"run_id": self.run_id, "time_ms": 0}
        job_id, model_group = ids.job_id(self.run_id, "rl"), ids.model_group(self.run_id, "policy")
        plan = PlanSettings(
            tasks_per_epoch=self.num_groups,
            batches_per_epoch=self.num_groups // GROUPS_PER_BATCH,
            max_staleness=self.num_groups,
            num_generations=SIZE,
            min_generations=MINIMUM,
        )
        return [
            RunStarted(
                **common,
                name=self.run_id,
                config={},
                seed=self.seed,
                dataset=store.put_bytes(lines, ".jsonl"),
                num_examples=self.num_groups,
                num_partitions=PARTITIONS,
            ),
            JobStarted(
                **common,
                job_id=job_id,
                model_group=model_group,
                base_version=0,
                plan=plan,
                rollout=RolloutSettings(environment="none"),
            ),
            EpochStarted(**common, job_id=job_id, epoch=0),
        ]


def make(num_steps: int, seed: int, run_id: str = "chaos") -> Workload:
    """Make `num_steps` step events or more, in whole groups that fill whole batches; at the end all deadlines have
    passed.
    """
    rng = random.Random(seed)
    open_at_once = 2 if num_steps < 10_000 else 4
    timeout_ms = TICK_MS * max(250, min(1200, num_steps // 8))
    groups: list[list[list[list[Event]]]] = [[] for _ in range(PARTITIONS)]
    steps = index = 0
    while steps < num_steps or index % GROUPS_PER_BATCH:
        group = _group(run_id, index, timeout_ms, rng)
        steps += sum(isinstance(event, StepRecorded) for attempt in group for event in attempt)
        groups[partition_of(ids.group_id(run_id, "rl", 0, index), PARTITIONS)].append(group)
        index += 1
    counts = dict.fromkeys(("step events", "repeated", "out of order", "late", "poison"), 0) | {"step events": steps}
    partitions = []
    for number in range(PARTITIONS):
        lines = _spoil(_mix(groups[number], open_at_once, rng), number, counts, rng)
        last = _line(Tick(run_id="", time_ms=(len(lines) + 1) * TICK_MS + timeout_ms, partition=number))
        partitions.append([*lines, last])
    return Workload(run_id, seed, index, partitions, counts)


# ---- groups ----


def _group(run_id: str, index: int, timeout_ms: int, rng: random.Random) -> list[list[Event]]:
    """Sequences of events, each of which keeps its order: the group's start first, then one a member."""
    group_id = ids.group_id(run_id, "rl", 0, index)
    policy = ids.model_group(run_id, "policy")
    agents = {"solver": policy, "critic": policy} if index % 10 == 9 else {"solver": policy}
    started = GroupStarted(
        run_id=run_id,
        time_ms=0,
        group_id=group_id,
        example_id=f"x{index:05d}",
        job_id=ids.job_id(run_id, "rl"),
        epoch=0,
        index=index,
        size=SIZE,
        minimum=SIZE if index % 16 == 5 else MINIMUM,
        enough=ENOUGH if index % 3 == 0 else 0,
        timeout_ms=timeout_ms,
        seed=index,
        reward_weights={"style": 0.5},
        agents=agents,
    )
    flat = rng.choice((0.0, 1.0)) if rng.random() < 0.05 else None
    fates = rng.choices(list(FATES), list(FATES.values()), k=SIZE)
    return [[started], *(_member(started, member, fate, flat, rng) for member, fate in enumerate(fates))]


def _member(started: GroupStarted, member: int, fate: str, flat: float | None, rng: random.Random) -> list[Event]:
    first, second = (_attempt(started, member, number, flat, rng) for number in (0, 1))
    half = rng.randrange(1, len(first))
    lost = _failed(started, member, 0, is_final=False)
    if fate == "plain":
        return first
    if fate == "rerun":
        return [*first[:half], lost, *second]
    if fate == "zombie":
        return [*first[:half], lost, *second[:-1], *first[half:], second[-1]]
    if fate == "superseded":
        return [*first[:-1], *second, first[-1]]
    if fate == "lost_for_good":
        return [*first[:half], lost, *second[:2], _failed(started, member, 1, is_final=True)]
    if fate == "wrong_digest":
        return [*first[:-1], first[-1].model_copy(update={"digest": "0" * 64})]
    if fate == "spliced":
        return [*_spliced(first), *second]
    return first[:half]


def _spliced(attempt: list[Event]) -> list[Event]:
    """A second producer writes the first step again, with another content, and ends the attempt by its own account."""
    started = attempt[0]
    assert isinstance(started, RolloutStarted)
    other = attempt[1].model_copy(update={"uuid": "written by another"})
    written = [other if event is attempt[1] else event for event in attempt[1:-1]]
    ended = attempt[-1].model_copy(update={"digest": _chain(started.rollout_id, written)})
    return [started, attempt[1], other, *attempt[2:-1], ended]


def _chain(rollout_id: str, events: list[Event]) -> str:
    return codec.chain(rollout_id, map(codec.content_digest, events))


def _attempt(started: GroupStarted, member: int, number: int, flat: float | None, rng: random.Random) -> list[Event]:
    """One attempt from its start to its end: every agent's calls with a tool between, one or two rewards."""
    rollout = ids.rollout_id(started.group_id, member, number)
    base: dict[str, Any] = {"run_id": started.run_id, "time_ms": 0, "group_id": started.group_id, "rollout_id": rollout}
    histories: dict[str, tuple[int, list[int]]] = {}
    steps = []
    order = [*started.agents, *rng.choices([*started.agents, "tool"], k=rng.randrange(5))]
    for index, agent in enumerate(order):
        uuid = f"{rollout}/{index}"
        if agent == "tool":
            step = {"agent": "solver", "event_type": "TOOL_END", "data": {"output": "x" * rng.randrange(40)}}
        else:
            step = {"agent": agent, "event_type": "LLM_END", "llm": _call(histories, agent, index, started, rng)}
        steps.append(StepRecorded(**base, step_index=index, uuid=uuid, **step))
    value = rng.randrange(-8, 9) / 8 if flat is None else flat
    rewards = [RewardRecorded(**base, reward_index=0, name="task", value=value)]
    if flat is None and rng.random() < 0.5:
        more = {"step_index": rng.randrange(len(steps)), "agent": rng.choice([None, *started.agents])}
        rewards.append(RewardRecorded(**base, reward_index=1, name="style", value=rng.randrange(8) / 8, **more))
    begin = RolloutStarted(**base, member=member, attempt=number, seed=member)
    content: list[Event] = [*steps, *rewards]
    digest = _chain(rollout, content)
    return [begin, *content, RolloutEnded(**base, num_steps=len(steps), num_rewards=len(rewards), digest=digest)]


def _call(
    histories: dict[str, tuple[int, list[int]]], agent: str, index: int, started: GroupStarted, rng: random.Random
) -> LLMCall:
    prompt = [rng.randrange(32_000) for _ in range(rng.randrange(2, 8))]
    completion = [rng.randrange(32_000) for _ in range(rng.randrange(1, 8))]
    before = histories.get(agent) if rng.random() < 0.9 else None
    prefix = None
    seen: list[int] = []
    if before is not None:
        at, seen = before
        packed = b"".join(token.to_bytes(4, "little") for token in seen)
        prefix = Prefix(step_index=at, length=len(seen), sha256=hashlib.sha256(packed).hexdigest())
    histories[agent] = index, [*seen, *prompt, *completion]
    return LLMCall(
        prefix=prefix,
        prompt_ids=encode_ids(prompt),
        completion_ids=encode_ids(completion),
        logprobs=encode_floats([-rng.randrange(64) / 16 for _ in completion]),
        spans=(VersionSpan(model_group=started.agents[agent], version=0, length=len(completion)),),
    )


def _failed(started: GroupStarted, member: int, number: int, *, is_final: bool) -> Event:
    rollout = ids.rollout_id(started.group_id, member, number)
    return RolloutFailed(
        run_id=started.run_id,
        time_ms=0,
        group_id=started.group_id,
        rollout_id=rollout,
        cause="producer_lost",
        is_final=is_final,
    )


# ---- a partition ----


def _mix(groups: list[list[list[Event]]], open_at_once: int, rng: random.Random) -> list[Event]:
    """The groups' records, a few groups open at once, every sequence in its order."""
    waiting = iter(groups)
    going: list[list[Iterator[Event]]] = []
    mixed: list[Event] = []
    while True:
        while len(going) < open_at_once and (group := next(waiting, None)) is not None:
            mixed += group[0]
            going.append([iter(sequence) for sequence in group[1:]])
        if not going:
            return mixed
        group_of = rng.choice(going)
        sequence = rng.choice(group_of)
        event = next(sequence, None)
        if event is not None:
            mixed.append(event)
            continue
        group_of.remove(sequence)
        if not group_of:
            going.remove(group_of)


def _spoil(events: list[Event], partition: int, counts: dict[str, int], rng: random.Random) -> list[Line]:
    """Repeats, disorder, lateness and poison; event time by place."""
    placed = [(float(index), event) for index, event in enumerate(events)]
    for index, event in enumerate(events):
        if rng.random() < REPEATED:
            counts["repeated"] += 1
            placed.append((index + (rng.uniform(1, 30) if rng.random() < 0.8 else rng.uniform(30, 600)), event))
        if rng.random() < LATE:
            counts["late"] += 1
            if rng.random() < 0.5 and isinstance(event, RolloutEnded):
                placed.append((index + rng.uniform(0.5, 300), _late_reward(event)))
            else:
                placed[index] = (index + rng.uniform(200, 900), event)
        elif rng.random() < OUT_OF_ORDER:
            counts["out of order"] += 1
            placed[index] = (index + rng.uniform(1, 4), event)
    placed.sort(key=lambda one: one[0])
    lines: list[Line] = []
    for number, (_, event) in enumerate(placed):
        lines.append(_line(event.model_copy(update={"time_ms": (number + 1) * TICK_MS})))
        if number % EXTENDED_EVERY == EXTENDED_EVERY - 1:
            lines.append(_line(_extended(event, (number + 1) * TICK_MS)))
        if rng.random() < POISON:
            counts["poison"] += 1
            lines.append(_poison(lines[-1], rng.randrange(10)))
        if rng.random() < POISON:
            lines.append(_line(Tick(run_id="", time_ms=(number + 1) * TICK_MS, partition=partition)))
    return lines


def _extended(event: Event, time_ms: int) -> Event:
    """Its group's deadline moves, or not if it is later already, or the group is closed."""
    deadline_ms = time_ms + TICK_MS * 200
    return GroupExtended(run_id=event.run_id, time_ms=time_ms, group_id=event.key, deadline_ms=deadline_ms)


def _late_reward(ended: RolloutEnded) -> Event:
    base = {"run_id": ended.run_id, "time_ms": 0, "group_id": ended.group_id, "rollout_id": ended.rollout_id}
    return RewardRecorded(**base, reward_index=ended.num_rewards, name="task", value=100.0)


def _line(event: Event) -> Line:
    encoded = codec.encode(event)
    return Line(encoded.key, encoded.value, encoded.headers, event)


def _poison(line: Line, kind: int) -> Line:
    """The record before, made undecodable."""
    assert line.value is not None
    content = orjson.loads(line.value)
    values: list[bytes | None] = [
        b"\xff\xfe" + line.value,
        line.value[:-3],
        orjson.dumps(content | {"kind": "no_such_kind"}),
        orjson.dumps(content | {"v": 99}),
        orjson.dumps({name: value for name, value in content.items() if name != "run_id"}),
        line.value[:-1] + b',"value":NaN}',
        line.value[:-1] + b',"time_ms":1e999}',
        None,
        b"[]",
        line.value,
    ]
    return Line(b"of another group" if kind == 9 else line.key, values[kind])
