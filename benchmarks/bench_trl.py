"""The learner beside TRL's trainers and a bare loop: CPU seconds, wall seconds and peak memory of an optimizer step.

    make bench-learner    # or: .venv-bench/bin/python -m benchmarks.bench_trl --repeats 3 --output FILE

GRPO, DPO and SFT on one batch: groups of 8 over one prompt, of fixed or of realistic (log-normal) lengths, with
models of 0.3M and 20M parameters made in place. Each pass is a process of its own on one thread, the systems take
turns, and what is kept are medians. TRL is tried with 1 to 32 rows a micro-batch first, on each case, and the fastest
setting of a case counts.
Its GRPO generates nothing: it is given the completions. The bare loop is torch, AdamW and the same prefix trees,
without anything else of the learner. Peaks are resident memory above what was held before the first step.
"""

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.recorded_scores import scored
from benchmarks.trl_settings import fastest, rows_tried
from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference, make_deterministic
from rollstream.learner.model.prefixes import tree_of
from rollstream.learner.model.step import StepResult, micro_batch_tokens, train_batch
from rollstream.learner.model.tree_attention import hidden_states
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import DpoSettings, GrpoSettings, SftSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.permissions import NOTHING
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, ModelSettings

SIZES: dict[str, dict[str, Any]] = {
    "0.3M": {"hidden_size": 96, "num_layers": 3, "intermediate_size": 256},
    "20M": {"hidden_size": 384, "num_layers": 10, "intermediate_size": 1408},
}
GROUPS = {"0.3M": 8, "20M": 2}
GROUP, STEPS = 8, 3
ALGORITHMS = {"grpo": GrpoSettings, "dpo": DpoSettings, "sft": SftSettings}
KINDS = tuple(ALGORITHMS)
LENGTHS = ("fixed", "realistic")
SYSTEMS = ("rollstream", "trl", "bare")
Texts = list[tuple[str, list[str]]]
Tokens = list[tuple[list[int], list[list[int]]]]
Costs = dict[str, float]
Step = Callable[[int], StepResult]


def texts_of(groups: int, lengths: str) -> Texts:
    """A prompt and 8 answers a group; one character is one token."""
    rng = random.Random(1)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))

    def size(median: int) -> int:
        return median if lengths == "fixed" else max(8, min(4 * median, int(rng.lognormvariate(math.log(median), 0.6))))

    return [(text(size(64)), [text(size(64)) for _ in range(GROUP)]) for _ in range(groups)]


def batch_of(texts: Texts, tokenizer: Any, kind: str) -> BatchView:
    """The same batch for the learner; answers end with the end token, as TRL's do."""
    rows: list[Row] = []
    members: list[Member] = []
    for group, (prompt, answers) in enumerate(texts):
        for index, answer in enumerate(answers):
            ids = [*tokenizer(prompt)["input_ids"], *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            mask, length = np.arange(len(ids)) >= len(prompt), len(ids) - len(prompt)
            spans = (VersionSpan(model_group="bench/main", version=0, length=length),)
            parts = (Completion(start=len(prompt), length=length, step_index=0, spans=spans),)
            logprobs = np.where(mask, -4.5, 0).astype(np.float32)
            rows.append(Row(np.asarray(ids, np.int32), mask, logprobs, len(members), parts))
            members.append(Member(f"g{group}", agent="agent", reward=float(index % 2)))
    if kind != "dpo":
        return BatchView(rows, members)
    pairs = [(index + 1, index) for index in range(0, len(rows), 2)]
    return BatchView(rows, members, pairs, [1.0] * len(pairs))


def timed(step: Callable[[int], object]) -> Costs:
    """Medians of some steps after a first one that is not counted."""
    cpu_s, wall_s, held = [], [], peak()
    for index in range(STEPS + 1):
        began_cpu, began = time.process_time(), time.perf_counter()
        step(index)
        cpu_s.append(time.process_time() - began_cpu)
        wall_s.append(time.perf_counter() - began)
    return {"cpu_s": statistics.median(cpu_s[1:]), "wall_s": statistics.median(wall_s[1:]), "peak_mib": peak() - held}


def ours(folder: str, kind: str, texts: Texts, **options: Any) -> Costs:
    """The learner's own step, see `our_step`."""
    return timed(our_step(folder, kind, texts, **options))


def our_step(
    folder: str, kind: str, texts: Texts, *, max_tokens: int | None = None, checkpointed: bool = False
) -> Step:
    """The step of a new run by its number: a reference's log-probabilities are computed before it, and the policy is
    compared with the one that sampled (version 0). `max_tokens`: of a micro-batch; the learner's default without it.
    """
    from transformers import AutoTokenizer

    algorithm = ALGORITHMS[kind](max_tokens_per_micro_batch=max_tokens)
    model_settings = ModelSettings(path=folder, device="cpu", gradient_checkpointing=checkpointed)
    job = JobSettings(kind=algorithm.kind, model=model_settings, algorithm=algorithm, revision=NEWEST_REVISION)
    model = PolicyModel(job.model, seed=0)
    model.use_dropout(False)
    model.compute_as(job.revision)
    reference = Reference(model, model.weights_bytes(), "base") if algorithm.needs.reference else None
    optimizer = make_optimizer(model.trainable(), job.optimizer)
    batch = batch_of(texts, AutoTokenizer.from_pretrained(folder), kind)
    of_forward, chosen = micro_batch_tokens(job, model.device), table.algorithm(kind, NOTHING)

    def step(index: int) -> StepResult:
        rows = scored(batch.rows, "reference", reference, of_forward) if reference else batch.rows
        given = replace(batch, rows=rows)
        return train_batch(model, optimizer, given, chosen, job, index=index, seed=index, version=0)

    return step


def bare(folder: str, kind: str, texts: Texts) -> Costs:
    """A loop over groups that shares prompts and does nothing else."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batch = batch_of(texts, AutoTokenizer.from_pretrained(folder), kind)
    groups = [batch.rows[at : at + GROUP] for at in range(0, len(batch.rows), GROUP)]
    total = sum(row.num_completion_tokens for row in batch.rows)

    def logprobs(module: Any, rows: Any, tree: Any) -> torch.Tensor:
        hidden = hidden_states(module.model, tree)[tree.sources_M]
        targets = torch.from_numpy(np.concatenate([row.token_ids[row.mask] for row in rows])).long()
        return torch.log_softmax(module.lm_head(hidden), -1).gather(1, targets[:, None])[:, 0]

    def step(index: int) -> None:
        optimizer.zero_grad()
        for rows in groups:
            tree = tree_of([row.token_ids for row in rows], [row.mask for row in rows])
            found = logprobs(model, rows, tree)
            lengths = [row.num_completion_tokens for row in rows]
            if kind == "sft":
                loss = -found.sum() / total
            elif kind == "grpo":
                signs = torch.tensor([1.0 if n % 2 else -1.0 for n in range(len(rows))])
                advantages = signs.repeat_interleave(torch.tensor(lengths))
                ratios = (found - found.detach()).exp()
                loss = -torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).sum() / total
            else:
                with torch.no_grad():
                    known = logprobs(reference, rows, tree)
                sums = torch.stack([part.sum() for part in (found - known).split(lengths)])
                loss = -torch.nn.functional.logsigmoid(0.1 * (sums[1::2] - sums[::2])).sum() / (len(batch.rows) / 2)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed(step)


def peak() -> float:
    """MiB that this process has been resident with at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass
class Spent:
    """Seconds of each step of a trainer."""

    cpu_s: list[float] = field(default_factory=list[float])
    wall_s: list[float] = field(default_factory=list[float])


def trl(folder: str, kind: str, texts: Texts, size: int, *, checkpointed: bool = False) -> Costs:
    """Some steps with micro-batches of `size` rows; of a preference pair, rows are half as many pairs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spent = Spent()
    common: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "callbacks": [clock(spent)],
    }
    num_rows = len(texts) * GROUP // (2 if kind == "dpo" else 1)
    options = trl_options(min(num_rows, size // 2 if kind == "dpo" else size), num_rows)
    options["gradient_checkpointing"] = checkpointed
    if kind == "grpo":
        trainer = trl_grpo(completions_of(tokens_of(texts, common["processing_class"])), common, options)
    else:
        trainer = trl_on_data(kind, texts, common, options)
    held = peak()
    trainer.train()
    return {
        "cpu_s": statistics.median(spent.cpu_s[1:]),
        "wall_s": statistics.median(spent.wall_s[1:]),
        "peak_mib": peak() - held,
    }


def clock(spent: Spent) -> Any:
    """A callback that measures steps, with what a GPU still computes of them."""
    from transformers import TrainerCallback

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            wait()
            self.began = time.process_time(), time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wait()
            spent.cpu_s.append(time.process_time() - self.began[0])
            spent.wall_s.append(time.perf_counter() - self.began[1])

    return Clock()


def trl_options(size: int, num_rows: int) -> dict[str, Any]:
    """Options common to the configurations of all trainers: micro-batches of `size` of a step's rows."""
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": num_rows // size,
        "max_steps": STEPS + 1,
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-6,
    }


def trl_grpo(given: dict[str, torch.Tensor], common: dict[str, Any], options: dict[str, Any]) -> Any:
    """A GRPOTrainer that is given its completions and advantages, see `completions_of`."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports] -- of .venv-bench
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return {name: values.to(self.accelerator.device) for name, values in given.items()}

    num_rows = len(given["advantages"])
    data = Dataset.from_list([{"prompt": str(index)} for index in range(num_rows)])
    args = GRPOConfig(**{"num_generations": GROUP, **options})
    return Given(**common, args=args, train_dataset=data, reward_funcs=lambda completions, **_: [0.0])


def trl_on_data(kind: str, texts: Texts, common: dict[str, Any], options: dict[str, Any]) -> Any:
    """A DPOTrainer or an SFTTrainer."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports] -- of .venv-bench
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    if kind == "dpo":
        rows = [
            {"prompt": prompt, "chosen": answers[n + 1], "rejected": answers[n]}
            for prompt, answers in texts
            for n in range(0, GROUP, 2)
        ]
        return DPOTrainer(**common, args=DPOConfig(**options), train_dataset=Dataset.from_list(rows))
    rows = [{"prompt": prompt, "completion": answer} for prompt, answers in texts for answer in answers]
    return SFTTrainer(**common, args=SFTConfig(**options), train_dataset=Dataset.from_list(rows))


def tokens_of(texts: Texts, tokenizer: Any) -> Tokens:
    """Token ids of prompts and answers; answers end with the end token."""
    ends = [tokenizer.eos_token_id]
    return [
        (tokenizer(prompt)["input_ids"], [[*tokenizer(one)["input_ids"], *ends] for one in answers])
        for prompt, answers in texts
    ]


def completions_of(groups: Tokens) -> dict[str, torch.Tensor]:
    """Generated completions in the form of TRL's GRPO: prompts padded on the left, completions on the right."""
    prompts = [prompt for prompt, found in groups for _ in found]
    answers = [one for _, found in groups for one in found]
    left, right = max(map(len, prompts)), max(map(len, answers))

    def tensor(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows)

    return {
        "prompt_ids": tensor([[0] * (left - len(one)) + one for one in prompts]),
        "prompt_mask": tensor([[0] * (left - len(one)) + [1] * len(one) for one in prompts]),
        "completion_ids": tensor([one + [0] * (right - len(one)) for one in answers]),
        "completion_mask": tensor([[1] * len(one) + [0] * (right - len(one)) for one in answers]),
        "advantages": torch.tensor([1.0 if n % 2 else -1.0 for n in range(len(answers))]),
        "num_items_in_batch": torch.tensor(float(sum(map(len, answers)))),
    }


def one_pass(system: str, folder: str, size: str, kind: str, lengths: str, micro_batch: str) -> Costs:
    """One system on one case, in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    texts = texts_of(GROUPS[size], lengths)
    if system == "rollstream":
        make_deterministic(1)
    if system == "trl":
        costs = trl(folder, kind, texts, int(micro_batch))
    else:
        costs = {"rollstream": ours, "bare": bare}[system](folder, kind, texts)
    tokens = sum(len(prompt) + len(answer) + 1 for prompt, answers in texts for answer in answers)
    return {**costs, "tokens_per_cpu_s": tokens / costs["cpu_s"]}


def main() -> None:
    """Interleave the systems, print and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--lengths", nargs="*", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--rows", type=int, help="of TRL's micro-batches; without it the fastest of each case")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--one", nargs=6, metavar=("SYSTEM", "FOLDER", "SIZE", "KIND", "LENGTHS", "ROWS"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_pass(*args.one)))
        return
    found: dict[str, dict[str, list[Costs]]] = {}
    with tempfile.TemporaryDirectory() as kept:
        folders = {name: str(make_tiny_model(Path(kept) / name, max_length=1024, **SIZES[name])) for name in args.sizes}
        cases = [(size, kind, lengths) for size in args.sizes for kind in args.kinds for lengths in args.lengths]
        tried = {case: {} if args.rows else tried_rows(folders[case[0]], *case) for case in cases}
        best = {case: args.rows or fastest(tried[case]) for case in cases}
        for _ in range(args.repeats):
            for case in cases:
                for system in SYSTEMS:
                    costs = in_process(system, folders[case[0]], *case, best[case])
                    found.setdefault(" ".join(case), {}).setdefault(system, []).append(costs)
    report: dict[str, Any] = {"cores": os.cpu_count(), "threads": 1, "repeats": args.repeats, "versions": versions()}
    report["trl_micro_batch_rows"] = {" ".join(case): rows for case, rows in best.items()}
    report["trl_cpu_s_by_rows"] = {" ".join(case): cpu_s for case, cpu_s in tried.items()}
    text = json.dumps({**report, "cases": {name: summary(case) for name, case in found.items()}}, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


def in_process(system: str, folder: str, size: str, kind: str, lengths: str, rows: int) -> Costs:
    """One pass in a process of its own; again if a signal ended it: SIGSEGV did so to one of TRL's in forty."""
    command = [sys.executable, "-m", "benchmarks.bench_trl", "--one", system, folder, size, kind, lengths, str(rows)]
    for is_last in (False, False, True):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode >= 0 or is_last:
            break
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr[-4000:]}")
    costs = json.loads(done.stdout.splitlines()[-1])
    print(size, kind, lengths, rows, system, costs, file=sys.stderr, flush=True)
    return costs


def tried_rows(folder: str, size: str, kind: str, lengths: str) -> dict[int, float]:
    """TRL's CPU seconds on a case by rows of its micro-batches."""
    rows = rows_tried(kind, GROUPS[size] * GROUP)
    return {number: in_process("trl", folder, size, kind, lengths, number)["cpu_s"] for number in rows}


def versions() -> dict[str, str]:
    """Versions of the compared packages."""
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}


def summary(case: dict[str, list[Costs]]) -> dict[str, Any]:
    """Medians by system, and how they compare."""
    made: dict[str, Any] = {
        system: {key: round(statistics.median(one[key] for one in passes), 3) for key in passes[0]}
        for system, passes in case.items()
    }
    mine, theirs, loop = made["rollstream"], made["trl"], made["bare"]
    made["times_trl_cpu"] = round(theirs["cpu_s"] / mine["cpu_s"], 2)
    made["times_trl_wall"] = round(theirs["wall_s"] / mine["wall_s"], 2)
    made["of_bare_loop"] = round(loop["cpu_s"] / mine["cpu_s"], 2)
    made["peak_of_trl"] = round(mine["peak_mib"] / theirs["peak_mib"], 2)
    return made


if __name__ == "__main__":
    main()
