"""CPU that the producers' event loop takes for a step event while `finetune` runs the demo's configuration.

    python benchmarks/demo_cost.py --epochs 10 [--tree /path/to/another/checkout]

The loop is the main thread of the producer service; generation is in a thread of its own and reported beside it. The
first fifth of the step events is left out, and with it imports and loading the model. Reads /proc, so Linux only. A
tree is another checkout with its own .venv, to compare commits one after the other.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from datetime import UTC
from pathlib import Path

import duckdb

INTERVAL_S = 0.2
Sample = tuple[float, dict[int, float]]
"""Wall clock, and CPU seconds by thread."""


def children(pid: int) -> list[int]:
    """Ids of all processes below a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _text(path).split()):
            found += [child, *children(child)]
    return found


def threads(pid: int) -> dict[int, float]:
    """CPU seconds of a process by thread."""
    spent: dict[int, float] = {}
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        if fields := _text(path).rpartition(")")[2].split():
            spent[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def run(tree: Path, epochs: int, folder: Path) -> tuple[int, list[Sample]]:
    """Run the demo's configuration; returns the producer's process id and its samples."""
    command, model = str(tree / ".venv/bin/rollstream"), str(folder / "model")
    subprocess.run([command, "tiny-model", model], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    options = {
        "trainer_adapters.learner.model.path": model,
        "finetuning.num_epochs": str(epochs),
        "finetuning.output_dir": str(folder / "output"),
    }
    arguments = ["--config_file", "examples/guess_number.yaml", "--workspace", str(folder / "workspace")]
    for name, value in options.items():
        arguments += ["-o", name, value]
    producer, samples = 0, list[Sample]()
    with subprocess.Popen([command, "finetune", *arguments], cwd=tree, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if not producer:
                running = [pid for pid in children(process.pid) if _is_producer(pid)]
                producer = running[0] if running else 0
            elif spent := threads(producer):
                samples.append((time.time(), spent))
            time.sleep(INTERVAL_S)
    return producer, samples


def _is_producer(pid: int) -> bool:
    return "\0serve\0producers\0" in _text(Path(f"/proc/{pid}/cmdline"))


def report(folder: Path, producer: int, samples: list[Sample]) -> dict[str, float]:
    """The cost of the steps that the run recorded."""
    with duckdb.connect(str(folder / "workspace/metrics.duckdb"), read_only=True) as database:
        rows = database.execute("SELECT recorded_at FROM steps ORDER BY 1").fetchall()
    recorded = [row[0].replace(tzinfo=UTC).timestamp() for row in rows]
    first, last = (
        min(samples, key=lambda sample, at=at: abs(sample[0] - at)) for at in (recorded[len(rows) // 5], recorded[-1])
    )
    steps = sum(first[0] < at <= last[0] for at in recorded)
    spent = {thread: total - first[1].get(thread, 0.0) for thread, total in last[1].items()}
    loop_s, wall_s = spent.pop(producer), last[0] - first[0]
    return {
        "steps": steps,
        "steps_per_s": round(steps / wall_s, 1),
        "loop_cpu_ms_per_step": round(loop_s / steps * 1000, 4),
        "loop_share_of_a_core": round(loop_s / wall_s, 3),
        "generation_cpu_ms_per_step": round(max(spent.values(), default=0.0) / steps * 1000, 4),
    }


def main() -> None:
    """Run once and print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        producer, samples = run(args.tree.absolute(), args.epochs, Path(folder))
        print(json.dumps(report(Path(folder), producer, samples), indent=2))


if __name__ == "__main__":
    main()
