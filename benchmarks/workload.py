"""The workload of the benchmarks: groups of 8 trajectories of 6 steps, as events in the order a producer writes them.

Three LLM steps of 48 tokens with log-probabilities (first prompt 64 tokens) alternate with three tool steps of
200 characters.
"""

import hashlib
import random
from collections.abc import Iterator

from rollstream.eventlog import codec
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutStarted,
    StepRecorded,
)
from rollstream.schemas.events.rollouts import LLMCall, Prefix, VersionSpan
from rollstream.schemas.tokens import encode_floats, encode_ids

MEMBERS = 8
LLM_STEPS = 3
PROMPT_TOKENS = 64
COMPLETION_TOKENS = 48
TOOL_CHARACTERS = 200
STEPS_PER_GROUP = MEMBERS * LLM_STEPS * 2
EVENTS_PER_GROUP = 1 + MEMBERS * (1 + LLM_STEPS * 2 + 1 + 1)
"""GroupStarted; and of each member its start, steps, reward and end."""


def group_events(run_id: str, index: int, *, job: str = "rl", epoch: int = 0, version: int = 0) -> Iterator[Event]:
    """All events of one group, its GroupStarted first; event time is 0 throughout."""
    group = ids.group_id(run_id, job, epoch, index)
    policy = ids.model_group(run_id, "policy")
    rng = random.Random(index)
    yield GroupStarted(
        run_id=run_id,
        time_ms=0,
        group_id=group,
        example_id=f"example-{index % 100}",
        job_id=ids.job_id(run_id, job),
        epoch=epoch,
        index=index,
        size=MEMBERS,
        minimum=2,
        timeout_ms=3_600_000,
        seed=index,
        agents={"agent": policy},
    )
    for member in range(MEMBERS):
        yield from rollout_events(run_id, group, member, rng, policy, version)


def rollout_events(
    run_id: str, group: str, member: int, rng: random.Random, policy: str, version: int
) -> Iterator[Event]:
    """One attempt: started, six steps, one reward, ended with the chained digest."""
    rollout = ids.rollout_id(group, member, 0)
    base = {"run_id": run_id, "time_ms": 0, "group_id": group, "rollout_id": rollout}
    yield RolloutStarted(**base, member=member, attempt=0, seed=member)
    digests: list[str] = []
    for step in steps_of(base, rng, policy, version):
        digests.append(codec.content_digest(step))
        yield step
    reward = RewardRecorded(**base, reward_index=0, name="environment", value=rng.random())
    digests.append(codec.content_digest(reward))
    yield reward
    yield RolloutEnded(**base, num_steps=len(digests) - 1, num_rewards=1, digest=codec.chain(rollout, digests))


def steps_of(base: dict, rng: random.Random, policy: str, version: int) -> Iterator[StepRecorded]:
    """LLM and tool steps in turn; each prompt extends the previous call token-exactly."""
    history: list[int] = []
    prefix: Prefix | None = None
    for turn in range(LLM_STEPS):
        prompt = [rng.randrange(32_000) for _ in range(PROMPT_TOKENS if turn == 0 else 8)]
        completion = [rng.randrange(32_000) for _ in range(COMPLETION_TOKENS)]
        call = LLMCall(
            prefix=prefix,
            prompt_ids=encode_ids(prompt),
            completion_ids=encode_ids(completion),
            logprobs=encode_floats([-rng.random() for _ in completion]),
            spans=(VersionSpan(model_group=policy, version=version, length=len(completion)),),
        )
        yield StepRecorded(
            **base, step_index=2 * turn, agent="agent", event_type="LLM_END", uuid=f"{member_of(base)}-{turn}", llm=call
        )
        history += prompt + completion
        prefix = Prefix(step_index=2 * turn, length=len(history), sha256=ids_sha256(history))
        yield StepRecorded(
            **base,
            step_index=2 * turn + 1,
            agent="agent",
            event_type="TOOL_END",
            uuid=f"{member_of(base)}-{turn}-tool",
            name="tool",
            data={"output": "x" * TOOL_CHARACTERS},
        )


def member_of(base: dict) -> str:
    """Member and attempt part of a rollout id."""
    return "-".join(base["rollout_id"].rsplit("/", 2)[1:])


def ids_sha256(token_ids: list[int]) -> str:
    """sha256 of little-endian int32 ids, as a Prefix names it."""
    packed = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.sha256(packed).hexdigest()
