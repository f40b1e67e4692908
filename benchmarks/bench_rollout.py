"""Rollouts with a real vLLM server and the gateway: new versions under load, added time, kills, mismatch.

    make bench-rollout BENCH="[SECTION...] [--small]"

| section | measures |
| --- | --- |
| lora, full | from a version's record sent to Kafka to its first token; requests lost; tokens/s beside updates |
| gateway | chat completions by the recording gateway, and by proxies that do nothing, beside those of vLLM itself |
| gateway_timed | the gateway beside a server that sleeps for each token, as if the model had cores of its own |
| kills | calls lost and doubled when the producers process is killed under load (the scripted engine) |
| kills_vllm | the same with vLLM, which goes on |
| run, run_full | guess_number on vLLM, an adapter and all weights: reward, and mismatch of engine and learner |
| run_own | run_full with the `transformers` engine and the same model |

vLLM runs on the CPU with a tiny model, and shares all cores with everything else. `--gpu`: vLLM on a GPU, in `lora`,
`full` and `gateway` with the configuration of Qwen2.5-0.5B, random weights and bfloat16; `--large`: that model on the
CPU, in `gateway`. Each section is kept in FILE under its own name, beside what other sections wrote there before.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import bench_learner, gateway_passes
from benchmarks.gateway_passes import Compared, Load, percentile
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import GROUP
from tests.rigs.services.gateway_load import ProducersProcess, killed_under_load
from tests.rigs.services.service_processes import CLI
from tests.rigs.services.vllm_server import (
    ENVIRONMENT,
    START_S,
    WHOLE_PROMPTS,
    executable,
    full_version,
    lora_version,
    scaled_version,
    serving,
    started_settings,
    tiny_base,
)

ROOT = Path(__file__).resolve().parents[1]
ANSWER_TOKENS = 64
PROMPT = list(range(10, 42))
LEAST_CALLS = 8
"""Calls of all clients together in a pass, at least."""
KILLS_LENGTH = 2048
"""Most tokens of a conversation that is continued over all kills."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    updates: int = 50
    interval_s: float = 1.0
    """Between two updates."""
    requests: int = 16
    """Concurrent requests while versions are updated."""
    passes: int = 5
    """Over which the updates are spread, each with a pass without updates before or after it, in turn."""
    rare_updates: int = 40
    """Updates of the whole weights, `rare_interval_s` apart, in `rare_passes` passes."""
    rare_interval_s: float = 5.0
    rare_passes: int = 20
    clients: Sequence[int] = (1, 16, 64)
    calls: int = 30
    """Calls of each client."""
    call_tokens: int = ANSWER_TOKENS
    """Tokens of the answer to a call."""
    warm_up_calls: int = 100
    """Calls of each client of the largest load, before anything is measured."""
    repeats: int = 3
    token_ms: Sequence[int] = (20, 5)
    """Milliseconds a token of the server that sleeps."""
    pass_s: float = 4.0
    """Its passes take about as long."""
    kills: int = 20
    epochs: int = 260
    """Epochs of GRPO, after those of the warm start: as many as in `make demo`."""
    model: str = "tiny"
    dtype: str = "float32"
    arguments: Sequence[str] = WHOLE_PROMPTS
    """Arguments of vLLM."""


SMALL = Sizes(
    updates=6, interval_s=0.5, requests=8, passes=1, rare_updates=2, rare_interval_s=1.0, rare_passes=1,
    clients=(1, 4), calls=5, warm_up_calls=2, repeats=1, pass_s=1.0, kills=2, epochs=3,
)  # fmt: skip
GPU = Sizes(
    updates=20, requests=64, passes=2, rare_updates=6, rare_interval_s=3.0, rare_passes=2, calls=10, warm_up_calls=30,
    repeats=2, model="0.5B", dtype="bfloat16",
    arguments=("--enforce-eager", "--gpu-memory-utilization=0.4", "--max-model-len=2048", "--max-num-seqs=128"),
)  # fmt: skip
LARGE = Sizes(
    calls=2,
    call_tokens=32,
    warm_up_calls=1,
    model="0.5B",
    dtype="bfloat16",
    arguments=(*WHOLE_PROMPTS, "--max-model-len=2048"),
)


def base_of(folder: Path, sizes: Sizes) -> Path:
    """The model that vLLM serves."""
    if sizes.model == "tiny":
        return tiny_base(folder)
    device = "cuda" if sizes is GPU else "cpu"
    return bench_learner.model_with_tokenizer(sizes.model, folder / "model", torch.bfloat16, device)


# ---- new versions under load ----


class RequestLoad:
    """Requests that follow one another without a pause, so many at a time."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.num_tokens = 0
        self.num_requests = 0
        self.lost: list[str] = []

    async def go_on(self, seed: int) -> None:
        """Until cancelled."""
        while True:
            request = GenerationRequest(GROUP, PROMPT, Sampling(max_new_tokens=ANSWER_TOKENS), seed)
            try:
                answer = await self._engine.generate(request)
            except RollstreamError as error:
                self.lost.append(str(error))
            else:
                if sum(span.length for span in answer.spans) != len(answer.token_ids):
                    self.lost.append(f"spans {answer.spans} of {len(answer.token_ids)} tokens")
                self.num_tokens += len(answer.token_ids)
            self.num_requests += 1
            seed += 1_000

    async def during(self, work: Awaitable[None]) -> float:
        """Tokens per second until `work` is done."""
        before, begun = self.num_tokens, time.perf_counter()
        await work
        return (self.num_tokens - before) / (time.perf_counter() - begun)


@asynccontextmanager
async def following(
    folder: Path, engine: VllmEngine, store: ArtifactStore, base: Path
) -> AsyncIterator[tuple[KafkaLog, WeightFollower]]:
    """A log in Kafka, and a follower that gives the engine what is published there, as in a producers process."""
    with EmbeddedBroker(folder / "broker") as broker:
        async with KafkaLog(broker.kafka, client_id="bench") as log:
            await log.ensure_topics(num_partitions=6)
            allowed = Permissions.of([f"model:{base}"], os.environ)
            follower = WeightFollower(log, store, engine, engine_id="bench", permissions=allowed)
            task = asyncio.create_task(follower.run())
            try:
                yield log, follower
            finally:
                task.cancel()
                await asyncio.wait({task})


def stored(store: ArtifactStore, version: tuple[WeightsPublished, Path]) -> WeightsPublished:
    """The record of a version whose weights are in the store."""
    event, path = version
    return event.model_copy(update={"artifact": store.put_file(path)})


async def measure_updates(folder: Path, make: Callable[..., Any], sizes: Sizes) -> dict[str, Any]:
    """Versions published under load, passes with and without updates interleaved."""
    os.environ.update(ENVIRONMENT)
    base, store = base_of(folder, sizes), ArtifactStore(str(folder / "artifacts"))
    versions = [stored(store, make(base, folder, number)) for number in range(sizes.updates + 1)]
    given: dict[str, Any] = {"arguments": sizes.arguments, "dtype": sizes.dtype, "start_timeout_s": START_S}
    settings = started_settings(folder=folder / "vllm", **given)
    engine, seconds, loading = VllmEngine(settings), list[float](), list[float]()

    async def update(numbers: Sequence[int]) -> None:
        for number in numbers:
            begun = time.perf_counter()
            await log.send(versions[number])
            await follower.wait_for(GROUP, number)
            loading.append(time.perf_counter() - begun)
            first = await engine.generate(GenerationRequest(GROUP, PROMPT, Sampling(max_new_tokens=1), number))
            seconds.append(time.perf_counter() - begun)
            assert {span.version for span in first.spans} == {number}
            await asyncio.sleep(max(0.0, sizes.interval_s - seconds[-1]))

    try:
        await engine.start()
        async with following(folder, engine, store, base) as (log, follower):
            await log.send(versions[0])
            await follower.wait_for(GROUP, 0)
            load, share = RequestLoad(engine), sizes.updates // sizes.passes
            workers = [asyncio.create_task(load.go_on(seed)) for seed in range(sizes.requests)]
            await asyncio.sleep(5 * sizes.interval_s)
            without: list[float] = []
            with_updates: list[float] = []
            for number in range(sizes.passes):
                numbers = range(number * share + 1, (number + 1) * share + 1)
                for is_updated in (number % 2 == 1, number % 2 == 0):
                    work = update(numbers) if is_updated else asyncio.sleep(share * sizes.interval_s)
                    (with_updates if is_updated else without).append(await load.during(work))
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
    finally:
        await engine.close()
    losses = [1 - beside / alone for beside, alone in zip(with_updates, without, strict=True)]
    return {
        "updates": len(seconds),
        "first_token_ms": {"p50": 1000 * statistics.median(seconds), "p99": 1000 * percentile(seconds, 0.99)},
        "loaded_ms": {"p50": 1000 * statistics.median(loading), "p99": 1000 * percentile(loading, 0.99)},
        "requests": load.num_requests,
        "lost": len(load.lost),
        "reasons": load.lost[:5],
        "seconds_between": sizes.interval_s,
        "tokens_per_s": {"without": without, "with": with_updates},
        "loss": statistics.median(losses),
        "loss_mean": statistics.fmean(losses),
        "loss_standard_error": statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None,
        "load_average": os.getloadavg(),
    }


def lora(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Versions of an adapter."""
    return asyncio.run(measure_updates(folder, lora_version, sizes))


def full(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Versions of all weights: one a second, as adapters, of the tiny model, and rarely, as after training steps of
    some seconds.
    """
    rare = dataclasses.replace(
        sizes, updates=sizes.rare_updates, interval_s=sizes.rare_interval_s, passes=sizes.rare_passes
    )
    is_large = sizes.model != "tiny"
    found: dict[str, Any] = {}
    for rate in (rare,) if is_large else (sizes, rare):
        (own := folder / f"{rate.interval_s}").mkdir()
        found[f"every {rate.interval_s:g} s"] = asyncio.run(
            measure_updates(own, scaled_version if is_large else full_version, rate)
        )
    return found


# ---- the gateway beside vLLM, and beside a server that takes no CPU ----


def measured_gateway(
    folder: Path, url: str, base: Path, loads: Sequence[Load], sizes: Sizes, *, has_proxies: bool
) -> Any:
    """Passes with the gateway and without, interleaved."""
    warm_up = Load(max(sizes.clients), sizes.warm_up_calls, min_tokens=8, max_tokens=8)
    with EmbeddedBroker(folder / "broker") as broker:
        both = Compared(folder, url, base, broker.kafka, has_proxies)
        return asyncio.run(both.measure(loads, sizes.repeats, warm_up)) | {"load_average": os.getloadavg()}


def gateway(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The recording gateway beside vLLM."""
    options: dict[str, Any] = {"base": base_of(folder, sizes), "dtype": sizes.dtype, "arguments": sizes.arguments}
    with serving(folder, is_lora=False, **options) as server:
        loads = [
            Load(clients, max(sizes.calls, LEAST_CALLS // clients), sizes.call_tokens, sizes.call_tokens)
            for clients in sizes.clients
        ]
        return measured_gateway(folder, server.url, server.base, loads, sizes, has_proxies=sizes is not LARGE)


def gateway_timed(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The recording gateway beside a server that sleeps for each token."""
    base, found = tiny_base(folder), dict[str, Any]()
    for token_ms in sizes.token_ms:
        calls = max(2, round(sizes.pass_s * 1000 / (ANSWER_TOKENS * token_ms)))
        loads = [Load(clients, calls, ANSWER_TOKENS // 2, ANSWER_TOKENS * 3 // 2) for clients in sizes.clients]
        (own := folder / f"{token_ms}").mkdir()
        with gateway_passes.serving("timed_server", str(base), str(token_ms)) as (url, _):
            found[f"{token_ms} ms a token"] = measured_gateway(own, url, base, loads, sizes, has_proxies=False)
    return found


def kills(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The gateway is killed under load."""
    with EmbeddedBroker(folder / "broker") as broker:
        producers = ProducersProcess(folder, broker.kafka)
        return dataclasses.asdict(asyncio.run(killed_under_load(producers, sizes.kills)))


def kills_vllm(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The gateway is killed under load; the vLLM server that it asks goes on."""
    base = tiny_base(folder, max_length=KILLS_LENGTH)
    options: dict[str, Any] = {"base": base, "dtype": "float32", "arguments": WHOLE_PROMPTS}
    with serving(folder, is_lora=False, **options) as server, EmbeddedBroker(folder / "broker") as broker:
        producers = ProducersProcess.on_vllm(folder, broker.kafka, server.url, base)
        begun = time.perf_counter()
        counted = asyncio.run(killed_under_load(producers, sizes.kills))
        return {**dataclasses.asdict(counted), "seconds": time.perf_counter() - begun}


# ---- a run ----


def run(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The task of `make demo` with an adapter on vLLM, which takes a higher learning rate than all weights."""
    return trained(folder, sizes, {"model": {"lora": {"rank": 16}}, "optimizer": {"learning_rate": 3e-3}})


def run_full(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The task of `make demo` with all weights on vLLM, and the learner's settings of `make demo`."""
    return trained(folder, sizes, {})


def run_own(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The same with the `transformers` engine, whose rewards show what vLLM changes."""
    return trained(folder, sizes, {}, kind="transformers")


def trained(folder: Path, sizes: Sizes, settings: dict[str, dict[str, Any]], kind: str = "vllm") -> dict[str, Any]:
    """A whole run by the command line; `settings` are added to those of the learner."""
    config = yaml.safe_load((ROOT / "examples/guess_number.yaml").read_text())
    builder, learner = config["trajectory_builders"]["rollouts"], config["trainer_adapters"]["learner"]
    if kind == "vllm":
        arguments = [one for one in sizes.arguments if sizes.model == "tiny" or "max-model-len" not in one]
        engine = {"kind": kind, "executable": executable(), "arguments": arguments, "dtype": "float32"}
        builder["engine"] = engine | ({"max_lora_rank": 16} if "model" in settings else {})
    learner["model"] |= {"path": str(tiny_base(folder))}
    for name, values in settings.items():
        learner[name] |= values
    config["finetuning"] |= {"num_epochs": sizes.epochs, "output_dir": str(folder / "output")}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    workspace, result = ["--workspace", str(folder / "w")], folder / "result.json"
    environment = {**os.environ, **ENVIRONMENT}

    def command(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*CLI, *arguments, *workspace], cwd=ROOT, env=environment, check=True, **options)

    def rows(query: str) -> list[dict[str, Any]]:
        return json.loads(command("sql", query, "--format", "json", stdout=subprocess.PIPE, text=True).stdout)

    begun = time.perf_counter()
    command("finetune", "--config_file", str(folder / "run.yaml"), "--result_json_path", str(result))
    seconds = time.perf_counter() - begun
    apart = rows("SELECT trained_version, mismatch_kl, log_ppl_diff, mismatch_ess FROM engine_mismatch")
    by_epoch = "SELECT epoch // 20 * 20 AS from_epoch, round(avg(avg_reward), 3) AS avg_reward FROM epoch_summary"
    return {
        "seconds": seconds,
        "status": json.loads(result.read_text())["status"],
        "reward": rows(f"{by_epoch} GROUP BY 1 ORDER BY 1"),
        "versions_compared": len(apart),
        "largest_mismatch_kl": max(abs(one["mismatch_kl"]) for one in apart),
        "largest_log_ppl_diff": max(abs(one["log_ppl_diff"] or 0.0) for one in apart),
        "smallest_ess": min(one["mismatch_ess"] for one in apart),
        "by_version": apart[:: max(1, len(apart) // 20)],
    }


SECTIONS = {
    "lora": lora,
    "full": full,
    "gateway": gateway,
    "gateway_timed": gateway_timed,
    "kills": kills,
    "kills_vllm": kills_vllm,
    "run": run,
    "run_full": run_full,
    "run_own": run_own,
}


def main() -> None:
    """Run sections, and keep each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--small", action="store_true", help="only see that each runs through")
    parser.add_argument("--gpu", action="store_true", help="vLLM on a GPU; sections are kept as NAME_gpu")
    parser.add_argument("--large", action="store_true", help="0.5B parameters on the CPU; sections kept as NAME_large")
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    if given.gpu and (given.small or not torch.cuda.is_available()):
        parser.error("--gpu needs an NVIDIA GPU and a vLLM for it (ROLLSTREAM_VLLM), and does not go with --small")
    if given.large and (given.small or given.gpu or set(given.sections) != {"gateway"}):
        parser.error("--large goes with the section gateway alone")
    if unknown := sorted(set(given.sections) - set(SECTIONS)):
        parser.error(f"unknown section {unknown[0]!r}; known sections: {', '.join(SECTIONS)}")
    sizes = SMALL if given.small else GPU if given.gpu else LARGE if given.large else Sizes()
    suffix = "_gpu" if given.gpu else "_large" if given.large else ""
    for name in given.sections or SECTIONS:
        with tempfile.TemporaryDirectory(prefix=f"bench-rollout-{name}-") as folder:
            found = {"cores": os.cpu_count(), "is_small": given.small, **SECTIONS[name](Path(folder), sizes)}
        print(f"== {name}\n{json.dumps(found, indent=2)}", flush=True)
        if given.output is not None:
            kept = json.loads(given.output.read_text()) if given.output.exists() else {}
            given.output.write_text(json.dumps(kept | {f"{name}{suffix}": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
