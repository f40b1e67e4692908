"""Tokens per second of the rollout engine in talks of several turns, continuous and static batches interleaved.

    python benchmarks/bench_engine.py --groups 32 --repeats 3 --output benchmarks/results/bench_engine.json

Groups of 8 talks have a common prompt; a turn's prompt is everything before it and a few new tokens. The length of an
answer is drawn from an exponential distribution by talk and turn, and is equal in all passes.
Rows and tokens are counted at the model's forwards.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.settings import ArtifactRef, Sampling

GROUP = "bench/policy"
MEMBERS = 8
PROMPT_TOKENS, TURN_TOKENS = 24, 12
MEAN_ANSWER, MAX_ANSWER = 24, 96
FIRST_ID, NUM_IDS = 6, 90
"""Ids of characters of the tiny model."""


@dataclass
class Forwards:
    """Counts of a model's forwards. Live rows: those whose sampled token was part of an answer."""

    prefills: int = 0
    prefill_tokens: int = 0
    decodes: int = 0
    decode_rows: int = 0

    def count(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        """A forward hook."""
        rows, width = kwargs["input_ids"].shape
        if width > 1 or not kwargs["past_key_values"].get_seq_length():
            self.prefills, self.prefill_tokens = self.prefills + 1, self.prefill_tokens + rows * width
        else:
            self.decodes, self.decode_rows = self.decodes + 1, self.decode_rows + rows


async def talk(engine: TransformersEngine, group: int, member: int, turns: int) -> int:
    """Answers of one talk, in turn; returns their number of tokens."""
    shared, own = random.Random(group), random.Random(f"{group}/{member}")
    prompt = [shared.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(PROMPT_TOKENS)]
    total = 0
    for _ in range(turns):
        limit = min(MAX_ANSWER, 1 + int(own.expovariate(1 / MEAN_ANSWER)))
        seed = own.randrange(2**32)
        answer = await engine.generate(GenerationRequest(GROUP, prompt, Sampling(max_new_tokens=limit), seed))
        total += len(answer.token_ids)
        new = [own.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(TURN_TOKENS)]
        prompt = [*prompt, *answer.token_ids, *new]
    return total


def published(folder: Path) -> WeightsPublished:
    """Version 0 of the tiny model."""
    return WeightsPublished(
        run_id="bench",
        time_ms=1,
        model_group=GROUP,
        job_id="bench/rl",
        batch_id=None,
        version=0,
        parent=None,
        term=1,
        weights_sha256="0" * 64,
        weights_format="full",
        base_model=str(folder),
        artifact=ArtifactRef(uri="none", sha256="0" * 64, size_bytes=0),
    )


async def measure(folder: Path, num_groups: int, turns: int, settings: dict[str, Any]) -> dict[str, float]:
    """One pass on a fresh engine that has been warmed up."""
    engine = TransformersEngine(TransformersSettings(**({"device": "cpu", "threads": 1} | settings)))
    await engine.start()
    try:
        await engine.load(published(folder), folder / "model.safetensors")
        await talk(engine, -1, 0, 1)
        forwards = Forwards()
        module = engine.module(GROUP)
        hook = module.register_forward_pre_hook(forwards.count, with_kwargs=True)
        begun, cpu = time.perf_counter(), time.process_time()
        talks = [talk(engine, group, member, turns) for group in range(num_groups) for member in range(MEMBERS)]
        tokens = sum(await asyncio.gather(*talks))
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
        hook.remove()
    finally:
        await engine.close()
    calls = num_groups * MEMBERS * turns
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / cpu_s,
        "live_share": (tokens - calls) / max(1, forwards.decode_rows),
        "mean_rows": forwards.decode_rows / max(1, forwards.decodes),
        "decodes": forwards.decodes,
        "prefills": forwards.prefills,
        "prefill_tokens": forwards.prefill_tokens,
        "tokens": tokens,
    }


def main() -> None:
    """Interleave the engines, print and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batching", nargs="+", default=["static", "continuous"])
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as kept:
        folder = make_tiny_model(Path(kept) / "model", max_length=1024)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors, folder / "model.safetensors")
        for _ in range(args.repeats):
            for turns in args.turns:
                for batching in args.batching:
                    settings = {"batching": batching} if batching != "default" else {}
                    one = asyncio.run(measure(folder, args.groups, turns, settings))
                    found.setdefault(f"{batching}, {turns} turns", []).append(one)
    report: dict[str, Any] = {"cores": os.cpu_count(), "talks": args.groups * MEMBERS, "repeats": args.repeats}
    for name, passes in found.items():
        report[name] = {key: round(statistics.median(one[key] for one in passes), 3) for key in passes[0]}
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
