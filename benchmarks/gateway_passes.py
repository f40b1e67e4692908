"""Calls through the recording gateway, bare proxies and none of them, interleaved: added time, tokens/s, CPU time."""

import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.producers import GatewayClient
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.settings import Sampling
from tests.rigs.services.gateway_load import ProducersProcess, task_for_agents

ROOT = Path(__file__).resolve().parents[1]
Ask = Callable[[int, int, int], Awaitable[dict[str, Any]]]
"""The answer to one call: client, number of the call, tokens."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclasses.dataclass(frozen=True)
class Load:
    """Clients that each make their calls one after the other, all clients at once."""

    clients: int
    calls: int
    min_tokens: int
    max_tokens: int

    def tokens(self, client: int, call: int) -> int:
        """Tokens of an answer: the same in every pass, and different between calls if the bounds are."""
        return self.min_tokens + (37 * client + 61 * call) % (self.max_tokens - self.min_tokens + 1)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Cost of one pass."""

    seconds: Sequence[float]
    """Seconds by client and call."""
    tokens_per_s: float
    cpu_ms: Mapping[str, float]
    """Per call, by process."""

    @property
    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "p50_ms": 1000 * statistics.median(self.seconds),
            "p99_ms": 1000 * percentile(self.seconds, 0.99),
            "tokens_per_s": self.tokens_per_s,
        }
        return found | {f"{name}_cpu_ms_per_call": cpu_ms for name, cpu_ms in self.cpu_ms.items()}


async def timed(ask: Ask, load: Load, processes: Mapping[str, psutil.Process]) -> Pass:
    """`processes`: whose CPU time is counted."""
    seconds: dict[tuple[int, int], float] = {}
    tokens = 0

    async def client(number: int) -> None:
        nonlocal tokens
        for call in range(load.calls):
            begun = time.perf_counter()
            answer = await ask(number, call, load.tokens(number, call))
            seconds[number, call] = time.perf_counter() - begun
            tokens += answer["usage"]["completion_tokens"]

    before, begun = {name: _cpu_s(one) for name, one in processes.items()}, time.perf_counter()
    await asyncio.gather(*map(client, range(load.clients)))
    ended = time.perf_counter()
    used = {name: 1000 * (_cpu_s(one) - before[name]) / len(seconds) for name, one in processes.items()}
    return Pass([seconds[key] for key in sorted(seconds)], tokens / (ended - begun), used)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def messages_of(client: int, call: int) -> list[dict[str, str]]:
    """Messages of one call."""
    return [{"role": "user", "content": f"client {client}, call {call}: go on"}]


async def plain_pass(url: str, model: str, load: Load, processes: Mapping[str, psutil.Process]) -> Pass:
    """OpenAI's chat completions are asked of `url`."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(client: int, call: int, max_tokens: int) -> dict[str, Any]:
            body = {"model": model, "messages": messages_of(client, call), "max_tokens": max_tokens}
            body |= {"temperature": 1.0, "logprobs": True, "seed": 1000 * client + call}
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        return await timed(ask, load, processes)


async def gateway_pass(gateway: GatewayClient, load: Load, processes: Mapping[str, psutil.Process]) -> Pass:
    """Each client plays a rollout."""
    claimed = [await gateway.claim(wait_s=120) for _ in range(load.clients)]
    rollouts = [rollout for rollout in claimed if rollout is not None]
    assert len(rollouts) == load.clients

    def ask(client: int, call: int, max_tokens: int) -> Awaitable[dict[str, Any]]:
        return rollouts[client].chat(messages_of(client, call), max_tokens=max_tokens)

    measured = await timed(ask, load, processes)
    for rollout in rollouts:
        async with rollout:
            await rollout.reward(1.0)
    return measured


@contextmanager
def serving(module: str, *arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """The address that a server of this folder prints, and its process."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, f"{module} did not start"
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


@dataclasses.dataclass
class Compared:
    """One server, asked through the gateway and without it."""

    folder: Path
    url: str
    base: Path
    kafka: KafkaSettings
    has_proxies: bool
    num_tasks: int = 0

    async def measure(self, loads: Sequence[Load], repeats: int, warm_up: Load) -> dict[str, Any]:
        """Measurements by number of clients, after one pass of `warm_up`, as in a service that has run for a while:
        Java compiles the broker's methods only after each was called a few hundred times.
        """
        with ExitStack() as stack:
            proxies: dict[str, tuple[str, psutil.Process]] = {}
            if self.has_proxies:
                kafka = self.folder / "kafka.json"
                kafka.write_text(self.kafka.model_dump_json())
                proxies["proxy"] = stack.enter_context(serving("bare_proxy", self.url))
                proxies["proxy with Kafka"] = stack.enter_context(serving("bare_proxy", self.url, str(kafka)))
            found: dict[str, Any] = {}
            async with self._gateway() as (log, gateway, process):
                await self._passes(log, gateway, process, warm_up, proxies, 1)
                for load in loads:
                    name = f"{load.clients} clients"
                    found[name] = await self._passes(log, gateway, process, load, proxies, repeats)
                    print(name, json.dumps(found[name]), flush=True)
            return found

    @asynccontextmanager
    async def _gateway(self) -> AsyncIterator[tuple[KafkaLog, GatewayClient, psutil.Process]]:
        producers = ProducersProcess.on_vllm(self.folder, self.kafka, self.url, self.base)
        async with KafkaLog(self.kafka, client_id="bench") as log:
            await log.ensure_topics(num_partitions=6)
            await log.send(producers.first_version())
            with producers.running() as process:
                async with GatewayClient.of_workspace(producers.workspace) as gateway:
                    yield log, gateway, psutil.Process(process.pid)

    async def _passes(
        self,
        log: KafkaLog,
        gateway: GatewayClient,
        process: psutil.Process,
        load: Load,
        proxies: Mapping[str, tuple[str, psutil.Process]],
        repeats: int,
    ) -> dict[str, Any]:
        passes: dict[str, list[Pass]] = {"plain": [], "gateway": [], **{name: [] for name in proxies}}
        broker = _broker()
        for number in range(-1, repeats):
            now = load if number >= 0 else dataclasses.replace(load, calls=2)  # the first pass warms up
            await self._ask_for_rollouts(log, now)
            done = {"gateway": await gateway_pass(gateway, now, {"own": process, "broker": broker})}
            done["plain"] = await plain_pass(self.url, str(self.base), now, {})
            for name, (url, proxy) in proxies.items():
                done[name] = await plain_pass(url, str(self.base), now, {"own": proxy, "broker": broker})
            for name, one in done.items() if number >= 0 else ():
                passes[name].append(one)
        return compared(passes)

    async def _ask_for_rollouts(self, log: KafkaLog, load: Load) -> None:
        sampling = Sampling(max_new_tokens=load.max_tokens)
        options = {"members": load.clients, "calls": load.calls, "timeout_s": 600.0, "sampling": sampling}
        await log.send(task_for_agents(self.num_tasks, **options))
        self.num_tasks += 1


def _broker() -> psutil.Process:
    return next(one for one in psutil.Process().children(recursive=True) if one.name() == "java")


def compared(passes: Mapping[str, Sequence[Pass]]) -> dict[str, Any]:
    """Medians over passes, and the time that each way adds to the plain one: the median over calls of the call's
    difference.
    """
    found: dict[str, Any] = {}
    for name, measured in passes.items():
        rows = [one.row for one in measured]
        found[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    for name in [name for name in passes if name != "plain"]:
        pairs = zip(passes[name], passes["plain"], strict=True)
        found[name]["added_p50_ms"] = 1000 * statistics.median(_added_s(one, plain) for one, plain in pairs)
        found[name]["throughput_ratio"] = found[name]["tokens_per_s"] / found["plain"]["tokens_per_s"]
    return found


def _added_s(one: Pass, plain: Pass) -> float:
    return statistics.median(a - b for a, b in zip(one.seconds, plain.seconds, strict=True))
