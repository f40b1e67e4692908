"""Effect of `follow_lag`: the demo's task with rollouts up to four versions early, whole runs in turn.

    python benchmarks/bench_follow_lag.py --output benchmarks/results/bench_follow_lag.json

`slow_rollouts` is the demo itself, whose learner waits most of the time. In `slow_learner` the engine plays a script,
so that rollouts take almost no time, and the model is larger, so that the learner limits the speed of the run; its
rewards mean nothing.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from bench_run import figures, read_weights

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.learner.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]
MAX_STALENESS = 4
SPEEDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "slow_rollouts": ({}, {}),
    "slow_learner": (
        {"hidden_size": 192, "num_layers": 4, "intermediate_size": 512},
        {"trajectory_builders.rollouts.engine.kind": "scripted", "trainer_adapters.learner.warm_start.num_epochs": "1"},
    ),
}
"""Shape of the model, and options of the run."""
WAYS = {"early": "false", "follow_lag": "true"}
Rows: TypeAlias = "dict[str, dict[str, list[dict[str, float]]]]"
"""Figures of each run, by speed and way."""
QUERY = """
SELECT avg(m.staleness) AS mean_staleness, max(m.staleness) AS max_staleness, avg(m.reward) AS mean_reward
FROM batch_members m JOIN batches b USING (run_id, batch_id) WHERE b.job_id = 'bench/rl'
"""


def one_run(model: Path, epochs: int, more: dict[str, str], follows: str) -> dict[str, float]:
    """A whole run in a fresh workspace."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        options = {
            "trainer_adapters.learner.model.path": str(model),
            "trainer_adapters.learner.max_staleness": str(MAX_STALENESS),
            "trajectory_builders.rollouts.follow_lag": follows,
            "finetuning.num_epochs": str(epochs),
            "finetuning.output_dir": str(workspace / "output"),
        } | more
        command = [*CLI, "finetune", "--config_file", "examples/guess_number.yaml", "--workspace", folder]
        command += ["--run_id", "bench"]
        for key, value in options.items():
            command += ["-o", key, value]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        command = [*CLI, "sql", QUERY, "--workspace", folder, "--format", "json"]
        (row,) = json.loads(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout)
        with EmbeddedBroker(workspace) as broker:
            found = figures(asyncio.run(read_weights(broker.kafka)))
    return row | {name: found[name] for name in ("versions", "seconds_per_version", "learner_wait_share")}


def median_of(found: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure."""
    return {name: round(statistics.median(row[name] for row in found), 4) for name in found[0]}


def report_of(rows: Rows, epochs: int) -> str:
    """Medians of the runs so far, and the machine."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    report: dict[str, Any] = {"cores": os.cpu_count(), "memory_gib": round(gib), "max_staleness": MAX_STALENESS}
    report |= {"epochs": epochs, "repeats": len(rows["slow_learner"]["follow_lag"])}
    report |= {speed: {way: median_of(found) for way, found in ways.items()} for speed, ways in rows.items()}
    return json.dumps(report, indent=2) + "\n"


def main() -> None:
    """Print and keep the medians, after each repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    rows: Rows = {speed: {way: [] for way in WAYS} for speed in SPEEDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repeats):
            for speed, (shape, options) in SPEEDS.items():
                model = make_tiny_model(Path(folder) / speed, **shape)
                for way, follows in WAYS.items():
                    rows[speed][way].append(one_run(model, arguments.epochs, options, follows))
                    print(speed, way, json.dumps(rows[speed][way][-1]), flush=True)
            text = report_of(rows, arguments.epochs)
            if arguments.output:
                arguments.output.write_text(text)
            print(text)


if __name__ == "__main__":
    main()
