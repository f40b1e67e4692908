"""Groups with a gradient in a batch of the demo, and its reward, with and without refills of flat groups.

    python -m benchmarks.bench_refill --generations 2 --refills 0 3 --output benchmarks/results/bench_refill.json

The demo's configuration (20 tasks an epoch, `--generations` of each in place of 8) by `rollstream finetune`, once for
each number of `max_refills` and seed, one run after the other. Counts come from the record and do not depend on the
machine's load; seconds do. `--reward`: the mean over five epochs whose first epoch, groups and seconds are reported.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.time_to_reward import MEAN_OVER, NUM_TASKS, finetune, query
from rollstream.learner.tiny_model import make_tiny_model

EPOCHS = """
SELECT epoch, avg_reward, groups, trained_groups, epoch_ms(sealed_at) / 1000.0 AS ended,
       epoch_ms(started_at) / 1000.0 AS began
FROM epochs WHERE run_id = '{run}' AND kind = 'rl' ORDER BY epoch
"""
Row = dict[str, Any]


def measured(workspace: Path, model: Path, refills: int, seed: int, args: argparse.Namespace) -> list[Row]:
    """The epochs of one run."""
    run = f"refills-{refills}-{seed}"
    options = {
        "trainer_adapters.learner.max_refills": refills,
        "trainer_adapters.learner.seed": seed,
        "trajectory_builders.rollouts.num_generations": args.generations,
    }
    finetune(
        workspace,
        model,
        run,
        args.epochs,
        *(part for key, value in options.items() for part in ("-o", key, str(value))),
    )
    return query(workspace, EPOCHS.format(run=run))


def reached(rows: list[Row], reward: float) -> Row | None:
    """Epoch, groups played and seconds until the mean reward of five epochs is that high; None if it never is."""
    for end in range(MEAN_OVER, len(rows) + 1):
        if statistics.fmean(row["avg_reward"] for row in rows[end - MEAN_OVER : end]) >= reward:
            groups = sum(row["groups"] for row in rows[:end])
            return {"epochs": end, "groups": groups, "seconds": round(rows[end - 1]["ended"] - rows[0]["began"], 1)}
    return None


def summary(rows: list[Row], reward: float) -> Row:
    """Counts of a run's epochs, then what depends on the machine's load."""
    trained = [row["trained_groups"] for row in rows]
    return {
        "trained_groups_mean": round(statistics.fmean(trained), 1),
        "trained_groups_min": min(trained),
        "full_batches": sum(number == NUM_TASKS for number in trained),
        "epochs": len(rows),
        "groups_mean": round(statistics.fmean(row["groups"] for row in rows), 1),
        "reward_last_10": round(statistics.fmean(row["avg_reward"] for row in rows[-10:]), 3),
        "reached": reached(rows, reward),
        "seconds_per_epoch": round((rows[-1]["ended"] - rows[0]["began"]) / len(rows), 2),
        "rewards": [round(row["avg_reward"], 3) for row in rows],
        "trained_groups": trained,
    }


def main() -> None:
    """Run each setting, print and keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--refills", type=int, nargs="*", default=[0, 3])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--reward", type=float, default=0.5)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    report: Row = {"cores": os.cpu_count(), "tasks_per_epoch": NUM_TASKS, "generations": args.generations}
    report |= {"reward": args.reward, "runs": {}}
    with tempfile.TemporaryDirectory() as kept:
        workspace = Path(kept)
        for seed in args.seeds:
            model = make_tiny_model(workspace / f"model-{seed}", seed=seed)
            for refills in args.refills:
                rows = measured(workspace, model, refills, seed, args)
                report["runs"][f"max_refills {refills}, seed {seed}"] = summary(rows, args.reward)
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
