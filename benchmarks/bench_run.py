"""The demo run on a fresh workspace: seconds a version, weight pick-up, share of time the learner waits, and replays.

    python benchmarks/bench_run.py --epochs 260 --repeats 3 --output run.json

Replays are whole commands, the start of broker and libraries included, and are held against the run's own seconds.
One that does not come out equal ends the benchmark; `--replays 20` asks twenty times of each.
Pick-up counts from the time stamp of WeightsPublished to that of WeightsLoaded, both written on one machine.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rollstream.eventlog import codec
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import Received, TopicPartition
from rollstream.schemas.events import StepTrained, WeightsLoaded, WeightsPublished
from rollstream.schemas.kafka import KafkaSettings

ROOT = Path(__file__).resolve().parents[1]
RUN_ID = "bench"
REPLAYS = {
    "verify": ("--verify",),
    "verify_3_workers": ("--verify", "--workers", "3"),
    "verify_6_workers": ("--verify", "--workers", "6"),
    "train": ("--train",),
}
CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]


def train(workspace: Path, epochs: int) -> float:
    """The demo's configuration for so many epochs; seconds that the run took."""
    model = workspace / "models" / "tiny"
    subprocess.run([*CLI, "tiny-model", str(model), "--seed", "0"], check=True, cwd=ROOT)
    options = {
        "trainer_adapters.learner.model.path": str(model),
        "finetuning.num_epochs": str(epochs),
        "finetuning.output_dir": str(workspace / "output"),
    }
    result = workspace / "result.json"
    command = [*CLI, "finetune", "--config_file", "examples/guess_number.yaml", "--workspace", str(workspace)]
    command += ["--run_id", RUN_ID, "--result_json_path", str(result)]
    for key, value in options.items():
        command += ["-o", key, value]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return float(json.loads(result.read_text())["seconds"])


def replay(workspace: Path, *options: str) -> float:
    """Seconds of one replay; it must come out equal."""
    began = time.monotonic()
    command = [*CLI, "replay", RUN_ID, *options, "--workspace", str(workspace)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


async def read_weights(kafka: KafkaSettings) -> list[Received]:
    """All of the weights topic."""
    events: list[Received] = []
    async with KafkaLog(kafka) as log:
        end = (await log.end_offsets("weights"))[0]
        where = TopicPartition("weights", 0)
        reader = await log.reader({where: 0})
        while reader.position(where) < end:
            events += [codec.decode(record) for record in await reader.poll()]
        await reader.close()
    return events


def figures(events: Iterable[Received]) -> dict[str, float]:
    """Medians over the run's reinforcement part."""
    published: dict[int, int] = {}
    loaded: dict[int, int] = {}
    skipped = 0
    trained: list[tuple[int, StepTrained]] = []
    for received in events:
        event, stamp = received.event, received.timestamp_ms
        if isinstance(event, WeightsPublished):
            published[event.version] = stamp
        elif isinstance(event, WeightsLoaded):
            loaded.setdefault(event.version, stamp)
            skipped += event.num_skipped
        elif isinstance(event, StepTrained) and event.job_id.endswith("/rl"):
            trained.append((stamp, event))
    first = min(step.version for _, step in trained)
    picked = [loaded[v] - published[v] for v in loaded if v in published and v >= first]
    wall_s = (trained[-1][0] - trained[0][0]) / 1000
    waited_s = sum(step.seconds.get("wait", 0.0) for _, step in trained[1:])
    return {
        "versions": len(trained),
        "seconds_per_version": wall_s / (len(trained) - 1),
        "pick_up_p50_ms": statistics.median(picked),
        "pick_up_max_ms": max(picked),
        "loaded": len(picked),
        "skipped": skipped,
        "learner_wait_share": waited_s / wall_s,
    }


def one_pass(epochs: int, replays: int) -> dict[str, float]:
    """One run, then its log, then so many replays of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        live_s = train(workspace, epochs)
        with EmbeddedBroker(workspace) as broker:
            found = figures(asyncio.run(read_weights(broker.kafka)))
        found |= {"live_s": live_s, "replays_equal": float(replays * len(REPLAYS))}
        for name, options in REPLAYS.items():
            seconds = statistics.median(replay(workspace, *options) for _ in range(replays))
            found |= {f"{name}_s": seconds, f"live_to_{name}": live_s / seconds}
    return found


def main() -> None:
    """Print and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=260)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replays", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    rows = [one_pass(arguments.epochs, arguments.replays) for _ in range(arguments.repeats)]
    report = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
