"""Prover and verifier on hidden bits, by every trainer: accuracy of the verifier by epoch, and rewards, several seeds.

    python benchmarks/bit_proof.py --epochs 60 --seeds 0 1 2 --output bit_proof.json --plot bit_proof.png

Each run has a fresh workspace and model. `untrained` is the accuracy of the group's first epoch, after the warm start;
`solo` trains the verifier alone, by RL: the best it can reach without a prover is 62.5 % (four bits, one look).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]
SOLO = ["trajectory_builders.rollouts.environment_config.protocol", "solo_verifier"]
TRAINERS: dict[str, tuple[str, list[str]]] = {
    "rl": ("examples/bit_proof.yaml", []),
    "expert_iteration": ("examples/bit_proof_ei.yaml", []),
    "malt": ("examples/bit_proof_malt.yaml", []),
    "solo": ("examples/bit_proof.yaml", SOLO),
}
ACCURACY = """
SELECT r.epoch, avg((s.output->>'$.is_correct')::BOOLEAN::INT) AS accuracy, count(*) AS episodes
FROM steps s JOIN rollouts r USING (rollout_id)
WHERE s.name = 'verdict' AND r.policy = 'model' GROUP BY ALL ORDER BY ALL
"""
REWARDS = """
SELECT epoch, agent, avg(reward) AS reward FROM trajectories WHERE job_id LIKE '%/rl' GROUP BY ALL ORDER BY ALL
"""
SHOWN = 5
"""Epochs at the beginning and at the end that the table's means are taken over."""


def rows(workspace: Path, sql: str) -> list[dict[str, Any]]:
    """Answer of a query."""
    command = [*CLI, "sql", sql, "--workspace", str(workspace), "--format", "json"]
    return json.loads(subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout)


def train(name: str, seed: int, epochs: int) -> dict[str, Any]:
    """One run: its figures by epoch."""
    example, options = TRAINERS[name]
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        workspace.mkdir(mode=0o700)
        model = workspace / "models" / "tiny"
        subprocess.run([*CLI, "tiny-model", str(model), "--seed", str(seed)], check=True, cwd=ROOT)
        pairs = {
            "trainer_adapters.learner.model.path": str(model),
            "trainer_adapters.learner.seed": str(seed),
            "finetuning.num_epochs": str(epochs),
            "finetuning.output_dir": str(workspace / "output"),
        }
        command = [*CLI, "finetune", "--config_file", example, "--workspace", str(workspace)]
        command += ["--run_id", f"{name.replace('_', '-')}-{seed}"]
        for key, value in [*pairs.items(), *zip(options[::2], options[1::2], strict=True)]:
            command += ["-o", key, value]
        began = time.monotonic()
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began
        found = {"accuracy": rows(workspace, ACCURACY), "rewards": rows(workspace, REWARDS)}
    return {"trainer": name, "seed": seed, "seconds": seconds, **found}


def ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last epochs."""
    return values[0], statistics.mean(values[-SHOWN:])


def show(runs: list[dict[str, Any]]) -> None:
    """Print a line a run."""
    print("trainer           seed  accuracy before -> after   rewards before -> after")
    for run in runs:
        before, after = ends([row["accuracy"] for row in run["accuracy"]])
        agents = sorted({row["agent"] for row in run["rewards"]})
        lines = []
        for agent in agents:
            first, last = ends([row["reward"] for row in run["rewards"] if row["agent"] == agent])
            lines.append(f"{agent} {first:.2f} -> {last:.2f}")
        print(f"{run['trainer']:17} {run['seed']:4}  {before:8.3f} -> {after:.3f}        {', '.join(lines)}")


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Accuracy by epoch: a thin line a seed, a thick one for their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(title="Hidden bits: share of right verdicts", xlabel="epoch", ylabel="accuracy", ylim=(0.4, 1.02))
    axes.grid(alpha=0.3)
    for number, name in enumerate(dict.fromkeys(run["trainer"] for run in runs)):
        color = f"C{number}"
        curves = [[row["accuracy"] for row in run["accuracy"]] for run in runs if run["trainer"] == name]
        for curve in curves:
            axes.plot(curve, color=color, linewidth=0.7, alpha=0.4)
        mean = [statistics.mean(values) for values in zip(*curves, strict=False)]
        axes.plot(mean, color=color, linewidth=2.2, label=f"{name} (mean of {len(curves)})")
    axes.axhline(0.625, color="grey", linestyle="--", linewidth=1, label="best without a prover")
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    """Train all, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the accuracies to this PNG file")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for name in arguments.trainers:
            runs.append(train(name, seed, arguments.epochs))
            print(f"{name} seed {seed}: {runs[-1]['seconds']:.0f} s", flush=True)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(runs, indent=1) + "\n")
    show(runs)
    if arguments.plot is not None:
        draw(runs, arguments.plot)


if __name__ == "__main__":
    main()
