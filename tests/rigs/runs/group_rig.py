"""A shared model group on a log in memory with every real service: producers, folds, and a learner of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.services import one_process
from rollstream.learner.shared_model_group import FineTuneOptions, GroupAgent, SharedAgentParams, SharedModelGroup
from rollstream.producers.engines.scripted import ScriptedEngine, ScriptedTokenizer
from rollstream.schemas.base import Event
from rollstream.schemas.events.recorded import (
    RecordedChat,
    RecordedReward,
    RecordedRollout,
    RecordedStep,
    RecordedTokens,
)
from rollstream.schemas.settings import OptimizerSettings

RUN, NAME = "run-1", "players"
GROUP = f"{RUN}/{NAME}"
WAIT_S = 240.0


def make_scripted_model(folder: Path) -> Path:
    """A Qwen2 of a few thousand parameters with the scripted engine's vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(ScriptedTokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def chat_step(answer: str | None, prompt: str = "?", agent: str = "") -> RecordedStep:
    """A call as text."""
    messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": prompt},)
    return RecordedStep(
        agent=agent, chat=RecordedChat(messages=messages, answer={"role": "assistant", "content": answer})
    )


def chat_rollout(*answers: str | None, agent: str = "") -> RecordedRollout:
    """A rollout of calls as text."""
    return RecordedRollout(steps=tuple(chat_step(answer, f"{n}?", agent) for n, answer in enumerate(answers)))


def sampled(*completion: int, reward: float) -> RecordedRollout:
    """A rollout of one call with exact tokens and its reward."""
    tokens = RecordedTokens.of([3, 6, 7], completion, [-2.0] * len(completion))
    return RecordedRollout(steps=(RecordedStep(tokens=tokens),), rewards=(RecordedReward(value=reward),))


@dataclass
class GroupRig:
    """The log, the artifacts and the workspace of one group."""

    folder: Path
    model: Path
    log: EventLog = field(default_factory=lambda: MemoryLog(num_partitions=2))
    now_ms: int = 1_000

    @property
    def artifact_uri(self) -> str:
        return str(self.folder / "artifacts")

    @property
    def allow(self) -> tuple[str, ...]:
        return (f"model:{self.model}",)

    def params(self, **changes: Any) -> SharedAgentParams:
        return SharedAgentParams(**{"model_name": str(self.model), "use_lora": False, "device": "cpu", **changes})

    def agents(self, names: Sequence[str] = ("prover", "verifier"), **changes: Any) -> list[GroupAgent]:
        params = self.params(**changes)
        return [GroupAgent(name, params, NAME, is_verifier=name == "verifier") for name in names]

    def options(self, **changes: Any) -> FineTuneOptions:
        defaults: dict[str, Any] = {
            "optimizer": OptimizerSettings(learning_rate=1e-2),
            "min_examples": 2,
            "threads": 1,
        }
        return FineTuneOptions(**{**defaults, **changes})

    async def open(self, agents: list[GroupAgent] | None = None, run_id: str = RUN, **changes: Any) -> SharedModelGroup:
        return await SharedModelGroup.open(
            self.log,
            ArtifactStore(self.artifact_uri),
            agents or self.agents(),
            run_id=run_id,
            group_name=NAME,
            options=self.options(**changes),
            now_ms=lambda: self.now_ms,
        )

    @asynccontextmanager
    async def services(self, *, learner: bool = True) -> AsyncIterator[None]:
        """Everything beside the group; `learner`: with one."""
        engine = ScriptedEngine()
        common = (self.log, self.artifact_uri, self.folder)
        working = [one_process.roll_out_and_plan(*common, engine, allow=self.allow)]
        working += [one_process.learn(*common, allow=self.allow, threads=1)] if learner else []
        tasks = [asyncio.create_task(one) for one in working]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def events(self, topic: str, *kinds: type[Event]) -> list[Any]:
        """Events of a topic, in order by partition."""
        ends = await self.log.end_offsets(topic)
        reader = await self.log.reader({TopicPartition(topic, n): -1 for n in ends})
        records: list[Any] = []
        while any(reader.position(TopicPartition(topic, n)) < end for n, end in ends.items()):
            records += await reader.poll(timeout_s=1)
        await reader.close()
        found = [codec.decode(record).event for record in records]
        return [event for event in found if not kinds or isinstance(event, kinds)]
