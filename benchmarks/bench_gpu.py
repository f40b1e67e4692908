"""The learner on one GPU: tokens per second, share of its peak, memory, seconds by phase; TRL's GRPOTrainer beside it.

    python -m benchmarks.bench_gpu --output benchmarks/results/bench_gpu.json [SECTION...]

GRPO steps of a model with the configuration of Qwen2.5-0.5B and random weights in float32, with products in bfloat16
by autocast in both programs. TRL is given the completions. Cases: `8k` has rows of 8,192 tokens, of which members of a
group share an eighth; `shared` has answers of about 1,024 tokens to prompts of 4,096. All settings of a case train one
batch in one process, one after another; figures are medians of steps after a first one.

`tokens_per_s` counts the tokens of all rows, so a prompt once for each of its answers. `mfu` is the FLOPs that a step
needs, whatever a program computes, over seconds and the dense bfloat16 peak of the GPU's data sheet: a prefix that rows
share counts once, padding and what is recomputed not at all. A forward pass needs 2 x weights of the layers x tokens,
2 x weights of the head x trained tokens, and 4 x width of all heads x layers x pairs of a token and one that it sees.
The backward pass needs twice that; for products with weights that are not trained (LoRA), as much as the forward pass.

Settings that need a package which is not installed (bitsandbytes, liger-kernel) are kept as errors.
"""

import argparse
import asyncio
import gc
import inspect
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import varlen

from benchmarks import bench_learner, bench_trl
from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.learner.model.tree_attention import use_flash_attention
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
"""Without a GPU, `--size tiny --cases small` rehearses all settings."""
PEAK_FLOPS = {"H200": 989.4e12, "H100 80GB HBM3": 989.4e12, "A100": 312e12}
"""Dense bfloat16 products a second by NVIDIA's data sheets, by a part of the GPU's name."""
PACKAGES = ("torch", "triton", "transformers", "trl", "liger_kernel", "bitsandbytes")
STEPS = 3
FIRST_ID, NUM_IDS = 6, 90


@dataclass(frozen=True)
class Case:
    """Groups over one prompt each."""

    groups: int
    members: int
    prompt: int
    answer: int
    varies: bool = False
    """Log-normal lengths of answers with that median, up to twice as long."""

    def rows(self) -> list[list[list[int]]]:
        """Token ids of each member's answer, after the prompt's, by group."""
        rng, found = random.Random(1), []
        for _ in range(self.groups):
            prompt = [FIRST_ID + rng.randrange(NUM_IDS) for _ in range(self.prompt)]
            lengths = [
                min(2 * self.answer, int(rng.lognormvariate(math.log(self.answer), 0.5)))
                if self.varies
                else self.answer
                for _ in range(self.members)
            ]
            found.append([prompt + [FIRST_ID + rng.randrange(NUM_IDS) for _ in range(one)] for one in lengths])
        return found


CASES = {"8k": Case(2, 4, 1024, 7168), "shared": Case(4, 8, 4096, 1024, varies=True), "small": Case(2, 2, 32, 32)}
FASTEST: dict[str, Any] = {"compile": True, "deterministic": False, "tokens": 32768}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "32,768 tokens": {"tokens": 32768},
    "not deterministic": {"deterministic": False},
    "not deterministic, 32,768 tokens": {"deterministic": False, "tokens": 32768},
    "without fused kernels": {"fused_kernels": False},
    "without shared prefixes": {"revision": 3},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "lora": {"lora": LoraSettings()},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "muon": {"optimizer": "muon"},
    "offload": {"offload": "cpu"},
    "compile": {"compile": True},
    "compile, 32,768 tokens": {"compile": True, "tokens": 32768},
    "compile, 65,536 tokens": {"compile": True, "tokens": 65536},
    "compile, not deterministic, 32,768 tokens": FASTEST,
}
if find_spec("flash_attn_interface"):
    VARIANTS["FA3, compile, not deterministic, 32,768 tokens"] = {**FASTEST, "flash_attention": "FA3"}
if find_spec("flash_attn") and find_spec("flash_attn.cute"):
    VARIANTS["FA4, compile, not deterministic, 32,768 tokens"] = {**FASTEST, "flash_attention": "FA4"}
"""Settings of the learner. `revision` 3 pads rows and computes them one by one."""
TRL_VARIANTS: dict[str, dict[str, Any]] = {
    "trl, 1 row": {"size": 1},
    "trl, 2 rows": {"size": 2},
    "trl, 4 rows": {"size": 4},
}
LIGER_VARIANTS = {
    "trl, 2 rows, liger": {"size": 2, "use_liger_kernel": True},
    "trl, 4 rows, liger": {"size": 4, "use_liger_kernel": True},
    "trl, 4 rows, liger, checkpointed": {"size": 4, "use_liger_kernel": True, "gradient_checkpointing": True},
}
SOME = ("default", "without shared prefixes", "compile", "trl, 4 rows", "trl, 4 rows, liger")
"""Settings that are measured of `shared`."""


def batch_of(case: Case) -> BatchView:
    """The batch of a case, with rewards that differ within each group."""
    rows, members = list[Row](), list[Member]()
    for group, found in enumerate(case.rows()):
        for index, ids in enumerate(found):
            mask = np.arange(len(ids)) >= case.prompt
            rows.append(Row(np.asarray(ids, np.int32), mask, np.where(mask, -12, 0).astype(np.float32), len(members)))
            members.append(Member(f"g{group}", "agent", reward=float(index % 2)))
    return BatchView(rows, members)


def model_flops(model: Any, case: Case, *, is_frozen: bool) -> tuple[float, int]:
    """FLOPs that a step needs, and the tokens of all rows. `is_frozen`: the model's own weights are not trained."""
    config = model.config
    head = model.get_output_embeddings().weight.numel()
    layers = sum(one.numel() for name, one in model.named_parameters() if ".layers." in name and one.ndim == 2)
    given = needed = trained = pairs = 0
    for found in case.rows():
        answers = [len(ids) - case.prompt for ids in found]
        given += sum(map(len, found))
        needed += case.prompt + sum(answers)
        trained += sum(answers)
        pairs += case.prompt**2 / 2 + sum(one * case.prompt + one**2 / 2 for one in answers)
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    products, attention = 2 * layers * needed + 2 * head * trained, 4 * width * config.num_hidden_layers * pairs
    return (2 if is_frozen else 3) * products + 3 * attention, given


@contextmanager
def measured(into: dict[str, Any]) -> Iterator[None]:
    """Most GPU memory that is allocated inside, in GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    into["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)


def wait() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Callable[[int], Any]) -> float:
    """Median seconds of some steps after a first one."""
    spent = []
    for index in range(STEPS + 1):
        wait()
        began = time.perf_counter()
        step(index)
        wait()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


def ours(folder: str, case: Case, variant: dict[str, Any]) -> dict[str, Any]:
    """The learner's step with these settings."""
    options = dict(variant)
    deterministic = options.pop("deterministic", True)
    make_deterministic(None, deterministic=deterministic)
    use_flash_attention(options.get("flash_attention", "FA2"))
    optimizing = OptimizerSettings(kind=options.pop("optimizer", "adamw"), offload=options.pop("offload", None))
    algorithm = GrpoSettings(max_tokens_per_micro_batch=options.pop("tokens", None))
    revision = options.pop("revision", NEWEST_REVISION)
    settings = ModelSettings(path=folder, device=DEVICE, dtype="bfloat16", deterministic=deterministic, **options)
    job = JobSettings(kind="rl", model=settings, algorithm=algorithm, optimizer=optimizing, revision=revision)
    found: dict[str, Any] = {}
    with measured(found):
        began = time.perf_counter()
        model = PolicyModel(settings, seed=0)
        model.use_dropout(False)
        model.compute_as(revision)
        found["load_s"] = time.perf_counter() - began
        optimizer, batch, results = make_optimizer(model.trainable(), optimizing), batch_of(case), []
        found["step_s"] = timed(
            lambda index: results.append(train_batch(model, optimizer, batch, Grpo(), job, index=index, seed=index))
        )
    for name in results[-1].seconds:
        found[f"{name}_s"] = statistics.median(one.seconds[name] for one in results[1:])
    found["packing_ratio"] = results[-1].metrics.get("tokens/packing_ratio", 1.0)
    if results[-1].micro_batch_tokens:
        found["micro_batch_tokens"] = results[-1].micro_batch_tokens
    return found


def trl(folder: str, case: Case, variant: dict[str, Any]) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same completions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = dict(variant)
    size, torch_dtype = options.pop("size"), torch.float32
    make_deterministic(None, deterministic=False)
    spent, found = bench_trl.Spent(), dict[str, Any]()
    with measured(found):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype)
        common = {"model": model, "processing_class": AutoTokenizer.from_pretrained(folder)}
        groups = [(rows[0][: case.prompt], [one[case.prompt :] for one in rows]) for rows in case.rows()]
        configured = bench_trl.trl_options(size, case.groups * case.members) | {
            "use_cpu": DEVICE == "cpu",
            "bf16": True,
        }
        common["callbacks"] = [bench_trl.clock(spent)]
        bench_trl.trl_grpo(
            bench_trl.completions_of(groups), common, {"num_generations": case.members, **configured, **options}
        ).train()
    return {**found, "step_s": statistics.median(spent.wall_s[1:])}


def made(folder: Path, size: str) -> tuple[str, Any]:
    """A folder with model and tokenizer; its module without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if size == "tiny":
        path = make_tiny_model(folder / "tiny", max_length=32768)
    else:
        path = bench_learner.model_with_tokenizer(size, folder / size, device=DEVICE)
    with torch.device("meta"):
        return str(path), AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def sections_of(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Section, name of a measurement, and the measurement."""
    path, shapes = made(folder, args.size)

    def on_case(name: str, measure: Callable[..., dict[str, Any]], variant: dict[str, Any]) -> dict[str, Any]:
        flops, given = model_flops(shapes, CASES[name], is_frozen="lora" in variant)
        found = measure(path, CASES[name], variant)
        found["tokens_per_s"] = given / found["step_s"]
        if peak := peak_flops():
            found["mfu"] = flops / found["step_s"] / peak
        return found

    systems = {"learner": (ours, VARIANTS), "trl": (trl, TRL_VARIANTS), "liger": (trl, LIGER_VARIANTS)}
    for section in ("learner", "trl", "liger"):  # Liger's kernels stay in transformers' classes
        measure, variants = systems[section]
        for case, (name, variant) in itertools.product(args.cases, variants.items()):
            if section in args.sections and name in (args.variants or (SOME if case == "shared" else variants)):
                yield case, name, partial(on_case, case, measure, variant)
    if "phases" in args.sections:

        def phases() -> dict[str, Any]:
            return asyncio.run(bench_learner.phases_of(str(folder / "phases"), args.size, 1, 3, device=DEVICE))

        yield "phases", "checkpoint_every 1", phases


def peak_flops() -> float | None:
    """See PEAK_FLOPS; None for a GPU that is not there."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def described() -> dict[str, Any]:
    """GPU and libraries."""
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1) if has_gpu else 0,
        "cuda": torch.version.cuda,
        "versions": {name: metadata.version(name) for name in PACKAGES if find_spec(name)},
        "varlen_attn has grouped heads": "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters,
        "peak_flops": peak_flops(),
        "steps": STEPS,
    }


def kept_in(file: Path | None) -> dict[str, Any]:
    """Figures of the file, to which others are added. Those of another GPU or other libraries are left out."""
    here = described()
    found = json.loads(file.read_text()) if file is not None and file.exists() else {}
    return found if all(found.get(name) == value for name, value in here.items()) else here


def measure_all(named: Iterable[tuple[str, str, Callable[[], dict[str, Any]]]], output: Path | None) -> None:
    """Print each result at once, and keep it beside those that are in the file."""
    warnings.simplefilter("ignore")
    began, report = time.monotonic(), kept_in(output)
    for section, name, measure in named:
        try:
            found = {key: round(one, 4) if isinstance(one, float) else one for key, one in measure().items()}
        except Exception as error:  # noqa: BLE001 -- a setting that fails is a result, and others follow
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        report.setdefault(section, {})[name] = found
        print(f"{time.monotonic() - began:.0f} s", section, name, found, file=sys.stderr, flush=True)
        if output:
            output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["phases", "learner", "trl", "liger"])
    parser.add_argument("--size", default="0.5B", choices=[*bench_learner.PHASES, "tiny"])
    parser.add_argument("--cases", nargs="*", default=["8k", "shared"], choices=CASES)
    parser.add_argument("--variants", nargs="*", help="names; without any, all")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available() and args.size != "tiny":
        parser.error("there is no NVIDIA GPU here; --size tiny --cases small rehearses the settings without one")
    make_deterministic(None)  # before the first product
    with tempfile.TemporaryDirectory() as kept:
        measure_all(sections_of(args, Path(kept)), args.output)


if __name__ == "__main__":
    main()
