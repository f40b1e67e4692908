"""Seconds until the demo's agent earns a reward: rollstream beside TRL's GRPOTrainer.

    .venv-bench/bin/python benchmarks/time_to_reward.py --reward 0.6 --output FILE

Both begin with the weights that the demo's warm start ends with, and play the same environment in the same number of
rollouts an epoch (20 tasks, 8 generations each, 6 turns) with the same loss, optimizer and mini-batches. rollstream is
run as users run it: its broker, producers, processors and learner on this machine. TRL generates with its own
`generate`, all open rollouts of a turn in one batch. The clock starts with the first epoch, models loaded, and stops
with the last rollout of the first epoch whose mean reward over five epochs is high enough.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.environments.guess_number import FALL, FOUND, compare

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]
LOOK_S = 60.0
"""Between two looks at the metrics of a run that stops early: each takes about a second of one core."""
NUM_TASKS, NUM_GENERATIONS, MAX_TURNS, MINI_BATCHES, MEAN_OVER = 20, 8, 6, 4, 5
EPOCHS = """
SELECT epoch, avg_reward, epoch_ms(sealed_at) / 1000.0 AS ended, epoch_ms(started_at) / 1000.0 AS began
FROM epochs WHERE run_id = '{run}' AND kind = 'rl' AND sealed_at IS NOT NULL ORDER BY epoch
"""
Curve = list[tuple[float, float]]
"""Seconds since the start of the first epoch, and the mean reward of an epoch."""


def rollstream(*arguments: str) -> str:
    """Run a command; its standard output."""
    done = subprocess.run([*CLI, *arguments], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.stdout


def finetune(workspace: Path, model: Path, run: str, epochs: int, *options: str) -> list[str]:
    """Arguments of the demo's run with so many epochs."""
    return [
        *("finetune", "--config_file", "examples/guess_number.yaml", "--workspace", str(workspace), "--run_id", run),
        *("-o", "trainer_adapters.learner.model.path", str(model), "-o", "finetuning.num_epochs", str(epochs)),
        *("-o", "finetuning.output_dir", str(workspace / "output" / run), *options),
    ]


def query(workspace: Path, statement: str) -> list[dict[str, Any]]:
    """The rows of a statement."""
    return json.loads(rollstream("sql", statement, "--workspace", str(workspace), "--format", "json"))


def ours(workspace: Path, model: Path, staleness: int, threads: int, index: int, args: argparse.Namespace) -> Curve:
    """A run of the pipeline, with so many threads of the engine and of the learner."""
    run = f"staleness-{staleness}-{threads}-{index}"
    options = {
        "trainer_adapters.learner.max_staleness": staleness,
        "trainer_adapters.learner.optimizer.learning_rate": args.learning_rate,
        "trainer_adapters.learner.threads": threads,
        "trajectory_builders.rollouts.engine.threads": threads,
    }
    given = (part for key, value in options.items() for part in ("-o", key, str(value)))
    command = [*CLI, *finetune(workspace, model, run, args.epochs, *given)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(LOOK_S)
            if running.poll() is None and args.stop and seconds_to(curve_of(workspace, run), args.reward):
                running.send_signal(signal.SIGINT)
                running.wait()
                return curve_of(workspace, run)
    if running.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {running.returncode}")
    return curve_of(workspace, run)


def curve_of(workspace: Path, run: str) -> Curve:
    """Epochs of a run by the metrics database: none before the first one has ended."""
    rows = query(workspace, EPOCHS.format(run=run))
    return [(row["ended"] - rows[0]["began"], row["avg_reward"]) for row in rows]


def warm_started(workspace: Path, model: Path) -> Path:
    """The weights that the first epoch begins with, as a folder of transformers."""
    rollstream(*finetune(workspace, model, "warm", 1))
    statement = "SELECT base_version FROM jobs WHERE run_id = 'warm' AND kind = 'rl'"
    version = query(workspace, statement)[0]["base_version"]
    rollstream("merge", f"warm@{version}", "--output", str(workspace / "warm"), "--workspace", str(workspace))
    return workspace / "warm"


def trl(folder: str, threads: int, seed: int, args: argparse.Namespace) -> Curve:
    """TRL's trainer on the same task, in this process."""
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports] -- of .venv-bench
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    curve: Curve = []
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=trl_config(args.epochs, seed, args.learning_rate),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": str(secret)} for secret in secrets_of(args.epochs, seed)]),
        reward_funcs=lambda completions, earned, **_: earned,
        rollout_func=playing(tokenizer, curve, args.reward if args.stop else None),
    )
    with contextlib.suppress(ReachedError):
        trainer.train()
    return curve


class ReachedError(Exception):
    """The reward has been earned, and the trainer is to stop."""


def secrets_of(epochs: int, seed: int) -> list[int]:
    """The numbers to guess, of all epochs; each block of ten has every digit once."""
    rng, secrets = random.Random(seed), list[int]()
    while len(secrets) < NUM_TASKS * epochs:
        secrets += rng.sample(range(10), 10)
    return secrets


def trl_config(epochs: int, seed: int, rate: float) -> Any:
    """Loss, optimizer and mini-batches of the demo, by TRL's names."""
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports] -- of .venv-bench

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        shuffle_dataset=False,
        per_device_train_batch_size=NUM_TASKS * NUM_GENERATIONS // MINI_BATCHES,
        steps_per_generation=MINI_BATCHES,
        num_generations=NUM_GENERATIONS,
        max_completion_length=3,
        max_steps=MINI_BATCHES * epochs,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        loss_type="dapo",
        learning_rate=rate,
        adam_beta1=0.9,
        adam_beta2=0.99,
        warmup_steps=80,
        lr_scheduler_type="linear",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def playing(tokenizer: Any, curve: Curve, stop: float | None) -> Callable[[list[str], Any], dict[str, Any]]:
    """A function for TRL's `rollout_func` that plays the rollouts of an epoch and adds the epoch to the curve.

    It raises `ReachedError` as soon as the mean over five epochs reaches `stop`, if given.
    """
    began: list[float] = []

    def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
        began.append(time.monotonic())
        games = [Game(tokenizer, int(prompt)) for prompt in prompts]
        for _ in range(MAX_TURNS):
            alive = [game for game in games if not game.ended]
            if alive:
                found, _ = trainer._generate_single_turn([game.context() for game in alive], None, {}, 1)
                for game, ids in zip(alive, found, strict=True):
                    game.guess(ids)
        rewards = [game.reward for game in games]
        curve.append((time.monotonic() - began[0], statistics.fmean(rewards)))
        if stop is not None and seconds_to(curve, stop):
            raise ReachedError
        return {
            "prompt_ids": [game.prompt for game in games],
            "completion_ids": [game.ids for game in games],
            "env_mask": [game.mask for game in games],
            "logprobs": None,
            "earned": rewards,
        }

    return play


class Game:
    """One rollout: the environment's rules, and the ids that TRL trains on."""

    def __init__(self, tokenizer: Any, secret: int) -> None:
        self._tokenizer = tokenizer
        self._secret = secret
        self._messages = [{"role": "user", "content": "?"}]
        self.prompt: list[int] = self._rendered()
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.turns = 0
        self.reward = 0.0
        self.ended = False

    def _rendered(self) -> list[int]:
        text = self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, tokenize=False)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def context(self) -> list[int]:
        """Context of the next guess."""
        return self.prompt + self.ids

    def guess(self, ids: list[int]) -> None:
        """Take the generated ids, and the environment's answer to them."""
        self.ids += ids
        self.mask += [1] * len(ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        answer = compare(text, self._secret)
        self.turns += 1
        self.ended = answer == FOUND or self.turns == MAX_TURNS
        if answer == FOUND:
            self.reward = 1.0 - FALL * (self.turns - 1) / MAX_TURNS
        if not self.ended:
            self._messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": answer}]
            given = self._rendered()[len(self.context()) :]
            self.ids += given
            self.mask += [0] * len(given)


def seconds_to(curve: Curve, reward: float) -> float | None:
    """Seconds until the first epoch whose mean over five reaches the reward; None if none does."""
    for index in range(MEAN_OVER, len(curve) + 1):
        if statistics.fmean(value for _, value in curve[index - MEAN_OVER : index]) >= reward:
            return round(curve[index - 1][0], 1)
    return None


def main() -> None:
    """Take turns, print and keep seconds and curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", type=float, default=0.6)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", nargs="*", default=[], help="sizes of the tiny model, as in hidden_size=384")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of both")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="that TRL is tried with")
    parser.add_argument(
        "--own-threads", type=int, nargs="*", default=[1], help="of rollstream's engine and learner, each"
    )
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--stop", action="store_true", help="end each run soon after it has earned the reward")
    parser.add_argument("--trl", nargs=3, metavar=("FOLDER", "THREADS", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        print(json.dumps(trl(args.trl[0], int(args.trl[1]), int(args.trl[2]), args)))
        return
    curves: dict[str, list[Curve]] = {}
    with tempfile.TemporaryDirectory() as kept:
        workspace, model = Path(kept), Path(kept) / "models" / "tiny"
        shape: dict[str, Any] = {name: int(size) for name, size in (one.split("=") for one in args.model)}
        make_tiny_model(model, seed=0, **shape)
        warm = warm_started(workspace, model)
        for index in range(args.repeats):
            for staleness, threads in itertools.product((0, 2), args.own_threads):
                made = ours(workspace, model, staleness, threads, index, args)
                curves.setdefault(f"rollstream, staleness {staleness}, {threads} threads", []).append(made)
            for threads in args.threads:
                command = [sys.executable, *sys.argv, "--trl", str(warm), str(threads), str(index)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                curves.setdefault(f"trl, {threads} threads", []).append(json.loads(done.stdout.splitlines()[-1]))
            for name, made in curves.items():
                print(name, [seconds_to(curve, args.reward) for curve in made], file=sys.stderr, flush=True)
    report = {"cores": os.cpu_count(), "model": args.model, "learning_rate": args.learning_rate}
    report |= {"reward": args.reward, "epochs": args.epochs, "systems": {}}
    for name, made in curves.items():
        report["systems"][name] = {
            "seconds": [seconds_to(curve, args.reward) for curve in made],
            "seconds_per_epoch": round(statistics.median(curve[-1][0] / len(curve) for curve in made), 3),
            "last_rewards": [round(statistics.fmean(value for _, value in curve[-10:]), 3) for curve in made],
        }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
