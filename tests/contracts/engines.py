"""The engines under the contract: how one is made, weights that fit it and weights that do not."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from rollstream.learner.model import collate
from rollstream.learner.model.policy import PolicyModel
from rollstream.processors.assemble.sequences import join_calls
from rollstream.producers.engines.base import Engine, Generation, GenerationRequest
from rollstream.producers.engines.openai import OpenAIEngine
from rollstream.producers.engines.routed import RoutedEngine, WatchedEngine
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.engines.table import new_engine
from rollstream.producers.openai.server import Endpoint, listening
from rollstream.schemas import tokens
from rollstream.schemas.engine_settings import OpenAISettings, TransformersSettings, VllmSettings
from rollstream.schemas.events import StepRecorded, TrajectoryAssembled, WeightsPublished
from rollstream.schemas.events.rollouts import LLMCall, Prefix
from rollstream.schemas.services import EndpointSettings
from rollstream.schemas.settings import ArtifactRef, LoraSettings, ModelSettings
from tests.rigs.services.vllm_server import MAX_LORAS, VllmServer

GROUP, OTHER = "run-1/policy", "run-1/other"
MAX_LENGTH = 512
Weights = tuple[WeightsPublished, Path]


@dataclass(frozen=True)
class Subject:
    """An engine under the contract."""

    new: Callable[[], Engine]
    """Not started."""
    weights: Callable[[str, int], Weights]
    """Weights of a model group and version: every version answers differently."""
    unfit: Callable[[str, int], Iterator[Weights]]
    """Weights that the engine must refuse."""
    learner: Callable[[int], PolicyModel] | None = None
    """The model of a version as the learner holds it, of an engine that loads models."""
    is_frozen: bool = False
    """Others hold the weights: nothing is loaded."""
    holds_groups: bool = True
    """Several model groups at once."""
    tells_tokens: bool = True
    """While they are sampled."""


def published(group: str, version: int, **changes: Any) -> WeightsPublished:
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "time_ms": 1,
        "model_group": group,
        "job_id": "run-1/rl",
        "batch_id": None,
        "version": version,
        "parent": None,
        "term": 1,
        "weights_sha256": "0" * 64,
        "weights_format": "full",
        "base_model": "none",
        "artifact": ArtifactRef(uri="none", sha256="0" * 64, size_bytes=0),
    }
    return WeightsPublished(**(fields | changes))


def scripted(folder: Path) -> Subject:
    """The engine without a model: an artifact that is not there is all that it can refuse."""

    def unfit(group: str, version: int) -> Iterator[Weights]:
        yield published(group, version), folder / "missing"

    return Subject(
        new=lambda: ScriptedEngine(delay_s=0.002, max_length=MAX_LENGTH),
        weights=lambda group, version: (published(group, version), folder),
        unfit=unfit,
    )


def routed(folder: Path) -> Subject:
    """The engine without a model, beside one that is served elsewhere and to which no group of the contract goes."""
    served = OpenAISettings(base_url="http://127.0.0.1:1/v1")
    subject = scripted(folder)
    return replace(subject, new=lambda: WatchedEngine(RoutedEngine(subject.new(), {"judge": OpenAIEngine(served, {})})))


NO_MODEL = {"scripted": scripted, "routed": routed}


def transformers(
    folder: Path,
    base: Path,
    *,
    lora: LoraSettings | None = None,
    deterministic: bool = False,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Subject:
    """The engine on a tiny model; its weights are what the learner publishes. Both compute in `dtype` on `device`."""

    @cache
    def learner(version: int) -> PolicyModel:
        model = ModelSettings(path=str(base), device=device, dtype=dtype, lora=lora)
        policy = PolicyModel(model, seed=0)
        policy.use_dropout(False)
        generator = torch.Generator().manual_seed(version)
        for _, parameter in policy.trainable():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += (0.5 if lora else 0.15) * noise.to(parameter.device)
        return policy

    def event(group: str, version: int) -> WeightsPublished:
        policy = learner(version)
        form: dict[str, Any] = {"weights_format": policy.weights_format, "lora": policy.adapter_config()}
        return published(group, version, base_model=str(base), **form)

    def weights(group: str, version: int) -> Weights:
        path = folder / f"v{version}.safetensors"
        if not path.exists():
            path.write_bytes(learner(version).weights_bytes())
        return event(group, version), path

    def unfit(group: str, version: int) -> Iterator[Weights]:
        state = {name: value.clone() for name, value in learner(version).weights().items()}
        first = sorted(state)[0]
        files = {
            "lacking": {name: value for name, value in state.items() if name != first},
            "extra": {**state, "model.extra": torch.zeros(1)},
            "shape": {**state, first: torch.zeros(3)},
        }
        for name, tensors in files.items():
            save_file(tensors, folder / f"{name}.safetensors")
            yield event(group, version), folder / f"{name}.safetensors"
        (folder / "torn.safetensors").write_bytes(b"torn")
        yield event(group, version), folder / "torn.safetensors"
        yield event(group, version), folder / "missing.safetensors"
        other_model = event(group, version).model_copy(update={"base_model": str(folder / "missing")})
        yield other_model, weights(group, version)[1]

    settings = TransformersSettings(device=device, dtype=dtype, threads=1, deterministic=deterministic)
    return Subject(
        new=lambda: new_engine(settings, {}),
        weights=weights,
        unfit=unfit,
        learner=learner,
        tells_tokens=not deterministic,
    )


def vllm(folder: Path, server: VllmServer, *, lora: LoraSettings | None, is_frozen: bool = False) -> Subject:
    """The engine over a real server that runs already, and that the engines before may have left with other weights.

    `is_frozen`: the frozen engine, which knows nothing of the server but its address.
    """
    if is_frozen:
        server.restore()
        asked = OpenAISettings(base_url=f"{server.url}/v1")
        return replace(scripted(folder), new=lambda: OpenAIEngine(asked, {}), is_frozen=True, tells_tokens=False)
    settings = VllmSettings(base_urls=(server.url,), folder=folder / "vllm", start_timeout_s=60, max_loras=MAX_LORAS)

    def new() -> Engine:
        server.restore()
        return new_engine(settings, {})

    return replace(transformers(folder, server.base, lora=lora), new=new, holds_groups=lora is not None)


@contextmanager
def openai(folder: Path, base: Path) -> Iterator[Subject]:
    """The frozen engine, asking our own endpoint over a tiny model in a thread of its own."""
    weights = transformers(folder, base, deterministic=True)

    async def serve(ready: "Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
        engine, done = weights.new(), asyncio.Event()
        settings = EndpointSettings(
            bootstrap_servers="none", artifact_uri="none", workspace=folder, name="endpoint", model_group=GROUP
        )
        await engine.start()
        try:
            await engine.load(*weights.weights(GROUP, 0))
            async with listening(Endpoint(engine, Loaded(), settings, "key"), "127.0.0.1", 0) as port:
                ready.set_result((port, asyncio.get_running_loop(), done))
                await done.wait()
        finally:
            await engine.close()

    ready: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(serve(ready)))
    thread.start()
    port, loop, done = ready.result(60)
    settings = OpenAISettings(base_url=f"http://127.0.0.1:{port}/v1", model=GROUP, api_key_variable="KEY")
    try:
        yield Subject(
            new=lambda: OpenAIEngine(settings, {"KEY": "key"}),
            weights=weights.weights,
            unfit=weights.unfit,
            is_frozen=True,
            tells_tokens=False,
        )
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)


class Loaded:
    """Weights that are there."""

    async def wait_for(self, model_group: str, version: int) -> None:
        """Return at once."""


def recomputed(
    model: PolicyModel, calls: list[tuple[GenerationRequest, Generation]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a conversation's completion tokens: as recorded, and as the learner computes them again.

    The prompt of each call continues the one before it, as the journal records it.
    """
    steps: list[StepRecorded] = []
    seen: list[int] = []
    for index, (request, generation) in enumerate(calls):
        sha256 = hashlib.sha256(np.asarray(seen, np.int32).tobytes()).hexdigest()
        prefix = Prefix(step_index=index - 1, length=len(seen), sha256=sha256) if seen else None
        steps.append(_step(index, list(request.prompt_ids)[len(seen) :], generation, prefix))
        seen = [*request.prompt_ids, *generation.token_ids]
    (sequence,) = join_calls(steps)
    trajectory = TrajectoryAssembled.model_construct(trajectory_id="t", sequences=(sequence,))
    (row,) = collate.rows_of(trajectory, needs_logprobs=True)
    batch = collate.pad([collate.TrainRow(row, row.mask)], [(0,)]).to(model.device)
    temperature = calls[0][0].sampling.temperature
    found, _ = model.completion_terms(batch, temperature=temperature, entropy_needs_grad=False)
    return batch.logprobs[batch.mask].cpu(), found.detach().cpu()


def _step(index: int, new_ids: list[int], generation: Generation, prefix: Prefix | None) -> StepRecorded:
    call = LLMCall(
        prefix=prefix,
        prompt_ids=tokens.encode_ids(new_ids),
        completion_ids=tokens.encode_ids(generation.token_ids),
        logprobs=tokens.encode_floats(generation.logprobs),
        spans=generation.spans,
        finish_reason=generation.finish_reason,
        kept_ids=None if generation.kept is None else tokens.encode_kept(generation.kept),
    )
    return StepRecorded(
        run_id="run-1",
        time_ms=1,
        group_id="run-1/g",
        rollout_id="run-1/r",
        step_index=index,
        agent="agent",
        event_type="LLM_END",
        uuid=str(index),
        llm=call,
    )
