"""Steps sent to a log, and what trackers have taken of them."""

import itertools
from pathlib import Path

from rollstream.metrics.trackers.follow import TrackedRun
from rollstream.metrics.trackers.points import Point, TrackedJob
from rollstream.schemas.trackers import CustomTrackerSettings
from tests.metrics.trackers.conftest import RUN, Crash, KeptTracker, asking

SETTINGS = CustomTrackerSettings(kind="python:a.B")
SFT, RL = f"{RUN}/sft", f"{RUN}/rl"
EXPECTED = {SFT: [("training", 1)], RL: [("training", 2), ("training", 3), ("epoch", 0), ("epoch", 1)]}


def tracked(tracker: KeptTracker, workspace: Path) -> TrackedRun:
    return TrackedRun(RUN, SETTINGS, tracker.open, workspace)


def send(one: TrackedRun, workspace: Path) -> None:
    """Send all that the metrics have, and finish a run that has ended."""
    ask, before = asking(workspace), -1
    while one.num_points > before:
        before = one.num_points
        one.send_new(ask, ask)
    one.send_new(ask, ask)


def steps(tracker: KeptTracker) -> dict[str, list[tuple[str, int]]]:
    return {
        job: [(mine[number].series, mine[number].step) for number in sorted(mine)]
        for job, mine in tracker.points.items()
    }


def send_to_the_end(tracker: KeptTracker, workspace: Path) -> int:
    """Send until nothing is new, with a new process after each crash; the number of crashes."""
    for crashes in itertools.count():
        one = tracked(tracker, workspace)
        try:
            send(one, workspace)
        except Crash:
            one.close()
            continue
        one.close()
        return crashes
    raise AssertionError


JOB = TrackedJob("run-000001", "run-000001/rl", "rl", "running", False, "grpo", "tiny", {"seed": 1})
FIRST = [Point("training", 1, 1000, {"training/loss": 0.5}), Point("epoch", 0, 2000, {"epoch/avg_reward": 0.25})]
SECOND = [
    Point("training", 2, 3000, {"training/loss": 0.125}),
    Point("validation", 1, 4000, {"validation/mean": 1.0}),
]
