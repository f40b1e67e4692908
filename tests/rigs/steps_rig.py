"""Records of `steps` for the tests of assembly: groups, whole attempts, failures, ticks; and folds of them."""

from typing import TypeVar

from rollstream.eventlog import codec
from rollstream.eventlog.log import Position, Received, TopicPartition
from rollstream.processors.assemble import fold as assembly
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    GroupExtended,
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    Tick,
)
from rollstream.schemas.events.rollouts import LLMCall, VersionSpan
from rollstream.schemas.tokens import encode_floats, encode_ids

RUN = "run"
E = TypeVar("E", bound=Event)


def group(index, run=RUN):
    return ids.group_id(run, "rl", 0, index)


def started(index=0, *, size=2, minimum=1, time_ms=0, timeout_ms=1000, run=RUN, **more):
    fields = {"example_id": f"x{index}", "job_id": f"{run}/rl", "epoch": 0, "index": index, "seed": index}
    fields |= {"agents": {"agent": f"{run}/policy"}} | more
    return GroupStarted(
        run_id=run,
        time_ms=time_ms,
        group_id=group(index, run),
        size=size,
        minimum=minimum,
        timeout_ms=timeout_ms,
        **fields,
    )


def attempt(index=0, member=0, number=0, *, num_steps=2, reward=1.0, time_ms=0, agent="agent", run=RUN, **ended):
    """All records of an attempt that came to its end."""
    rollout = ids.rollout_id(group(index, run), member, number)
    base = {"run_id": run, "time_ms": time_ms, "group_id": group(index, run), "rollout_id": rollout}
    span = VersionSpan(model_group=f"{run}/policy", version=3, length=2)
    steps = []
    for step in range(num_steps):
        call = LLMCall(
            prompt_ids=encode_ids([step, member]),
            completion_ids=encode_ids([7, number]),
            logprobs=encode_floats([-1, -2]),
            spans=(span,),
        )
        steps.append(StepRecorded(**base, step_index=step, agent=agent, event_type="LLM_END", uuid=f"{step}", llm=call))
    rewards = [RewardRecorded(**base, reward_index=0, name="task", value=reward)]
    digest = codec.chain(rollout, map(codec.content_digest, steps + rewards))
    last = {"num_steps": num_steps, "num_rewards": 1, "digest": digest} | ended
    begin = RolloutStarted(**base, member=member, attempt=number, seed=0)
    return [begin, *steps, *rewards, RolloutEnded(**base, **last)]


def failed(index=0, member=0, number=0, *, is_final=False, time_ms=0, cause="engine_error"):
    rollout = ids.rollout_id(group(index), member, number)
    return RolloutFailed(
        run_id=RUN, time_ms=time_ms, group_id=group(index), rollout_id=rollout, cause=cause, is_final=is_final
    )


def extended(index=0, *, deadline_ms, time_ms=0):
    return GroupExtended(run_id=RUN, time_ms=time_ms, group_id=group(index), deadline_ms=deadline_ms)


def tick(time_ms):
    return Tick(run_id="", time_ms=time_ms, partition=0)


async def records_of(log, topic, partition=0):
    """Everything that a partition holds."""
    reader = await log.reader({TopicPartition(topic, partition): 0})
    found = []
    while more := await reader.poll(timeout_s=0.01):
        found += more
    await reader.close()
    return found


async def events_of(log, topic, kind: type[E]) -> list[E]:
    """All events of a topic, of which every one must be of a kind."""
    found: list[E] = []
    for partition in range(await log.num_partitions(topic)):
        for record in await records_of(log, topic, partition):
            event = codec.decode(record).event
            assert isinstance(event, kind)
            found.append(event)
    return found


def received_of(events, first=0):
    return [
        Received(event, codec.content_digest(event), Position("steps", 0, offset), 0)
        for offset, event in enumerate(events, first)
    ]


def fold(received, state=None):
    state = state or assembly.initial()
    return [closing for one in received for closing in assembly.evolve(state, one)]


def closings_of(*events):
    return fold(received_of(events))


def content(closings):
    """Content digest by event id; the first occurrence wins, as in every reader."""
    found = {}
    for closing in closings:
        for event in (*closing.trajectories, closing.closed):
            found.setdefault(event.event_id, codec.content_digest(event))
    return found
