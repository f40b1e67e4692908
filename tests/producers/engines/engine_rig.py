"""The transformers engine on a tiny model: weights to load, requests to make, and what a plain forward says of them."""

import asyncio
import random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.sampling import SamplingBatch, distribution
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.settings import ArtifactRef, Sampling

GROUP, OTHER = "run-1/policy", "run-1/other"


def noised(folder, version):
    generator = torch.Generator().manual_seed(version)
    state = load_file(folder / "model.safetensors")
    return {name: value + 0.15 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def reference(base, folder, version):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.load_state_dict(noised(folder, version), strict=False)
    return model


def published(folder, version=0, group=GROUP, **changes):
    fields = {
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
        "base_model": str(folder),
        "artifact": ArtifactRef(uri="none", sha256="0" * 64, size_bytes=0),
    }
    return WeightsPublished(**(fields | changes))


def requests(count, *, seed=0, group=GROUP, max_new_tokens=12, **sampling):
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(2, 100) for _ in range(rng.randint(1, 30))]
        settings = Sampling(max_new_tokens=rng.randint(1, max_new_tokens), **sampling)
        made.append(GenerationRequest(group, prompt, settings, seed * 1000 + number))
    return made


def run(work, *loads, **settings):
    """`await work(engine)` with an engine that has loaded `loads`."""
    chosen: dict[str, Any] = {"device": "cpu", "threads": 1} | settings

    async def main():
        engine = TransformersEngine(TransformersSettings(**chosen))
        await engine.start()
        try:
            for event, path in loads:
                await engine.load(event, path)
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def together(asked):
    async def work(engine):
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    return work


def one_by_one(asked):
    async def work(engine):
        return [await engine.generate(request) for request in asked]

    return work


def full_forward_logprobs(model, request, generation):
    """Log-probabilities by one plain forward over prompt and completion, without cache or padding."""
    ids = torch.tensor([[*request.prompt_ids, *generation.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
    how = SamplingBatch.of([request.sampling] * len(logits), logits.shape[-1], torch.device("cpu"))
    return distribution(logits, how).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]


def adapter(folder, tmp_path, seed, *, rank=4, modules=("q_proj", "v_proj"), **options):
    """A peft model, its file of weights, and its configuration as a learner publishes it."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=16, target_modules=list(modules), task_type="CAUSAL_LM", **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    path = tmp_path / f"adapter-{seed}-{rank}.safetensors"
    save_file(dict(get_peft_model_state_dict(model, save_embedding_layers=False)), path)
    lora = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(modules), "task_type": "CAUSAL_LM"}
    return model.eval(), path, lora | options
