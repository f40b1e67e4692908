"""Named points where a test can crash a process, each between two actions that must tolerate a crash in between.

An unarmed failpoint costs one read of a module variable. Armed by code it raises `Killed`; armed by the environment
variable ROLLSTREAM_FAILPOINT it sends SIGKILL to its own process, so that no cleanup runs.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollstream.schemas.errors import ConfigError

VARIABLE = "ROLLSTREAM_FAILPOINT"
"""`name:n`, or several of them with commas: the process kills itself at the n-th hit of a name."""
ONCE = "ROLLSTREAM_FAILPOINT_ONCE"
"""A folder in which a file keeps each kill; a name that has one does not kill again, so that a restart goes on."""

FAILPOINTS: dict[str, str] = {
    "assemble/after-fold-before-send": "groups are closed in memory, nothing of them is sent",
    "assemble/after-trajectories-before-groups": "trajectories are acknowledged, their GroupClosed is not sent",
    "assemble/after-send-before-mark": "all is acknowledged, the mark still holds it back",
    "curate/after-fold-before-send": "a batch of groups is folded, its answers are not sent",
    "curate/after-send-before-mark": "the answers are acknowledged, the mark is not behind the batch",
    "producer/after-group-started": "the group is open in the log, no attempt has begun",
    "producer/after-step": "a step is acknowledged",
    "producer/before-rollout-ended": "every step and reward is acknowledged, the last event is not sent",
    "producer/during-hand-over": "partitions are assigned, what their last owner left is not read",
    "gateway/after-reward-before-answer": "a reward is acknowledged, its sender is not answered",
    "gateway/after-end-before-answer": "the end of an agent is acknowledged, the agent is not answered",
    "learner/within-scores-of-group": "a process has computed its part of a group's scores, others may not have theirs",
    "learner/between-scores-of-groups": "ReferenceScored of a group of rollouts are acknowledged, those of others not",
    "learner/after-train-before-checkpoint": "a batch is trained in memory only",
    "learner/between-checkpoint-and-publish": "the checkpoint is on disk, the log does not know its version",
    "learner/between-step-and-weights": "StepTrained is acknowledged, WeightsPublished is not sent",
    "learner/between-collected-and-removed": "WeightsCollected is acknowledged, its files are still there",
    "metrics/inside-transaction": "rows and offsets are written, the transaction is open",
    "metrics/after-transaction": "the transaction is finished, its offsets are not remembered",
}
"""The armed action of each failpoint, by name."""


class Killed(BaseException):
    """Simulates the end of the process in a test of the same process. No service catches it."""


class Armed:
    """Counts the hits of armed points and kills at the configured one, once each."""

    def __init__(self, points: Mapping[str, int], kill: Callable[[str], None]) -> None:
        """`points`: the hit to kill at, from 1, by name. Raises ConfigError for an unknown name."""
        for name, hit in points.items():
            if name not in FAILPOINTS:
                raise ConfigError(f"failpoint {name!r} does not exist; known failpoints: {', '.join(FAILPOINTS)}")
            if hit < 1:
                raise ConfigError(f"failpoint {name}: hits count from 1, not {hit}; give 1 or more")
        self.hits = dict.fromkeys(points, 0)
        self.fired: list[str] = []
        """Names at which it has killed."""
        self._points = dict(points)
        self._kill = kill

    def __call__(self, name: str) -> None:
        if name not in self._points:
            return
        self.hits[name] += 1
        if self.hits[name] == self._points[name]:
            self.fired.append(name)
            self._kill(name)


def failpoint(name: str) -> None:
    """Pass a named point; ends the process if it is armed for this hit."""
    if _armed is not None:
        _armed(name)


@contextmanager
def armed(name: str, hit: int = 1) -> Iterator[Armed]:
    """Within the context the `hit`-th pass of a point raises Killed. Raises ConfigError for an unknown name."""
    global _armed
    before, _armed = _armed, Armed({name: hit}, _raise)
    try:
        yield _armed
    finally:
        _armed = before


def from_environment(env: Mapping[str, str]) -> Armed | None:
    """The failpoints armed by the environment, None if there are none. Raises ConfigError that names the variable."""
    text = env.get(VARIABLE, "")
    if not text:
        return None
    points: dict[str, int] = {}
    for part in text.split(","):
        name, _, hit = part.strip().partition(":")
        if hit and not hit.isdecimal():
            raise ConfigError(
                f"{VARIABLE}={text}: {part.strip()!r} is not a failpoint and a hit; write name:n, with n from 1"
            )
        points[name] = int(hit or 1)
    folder = env.get(ONCE)
    return Armed(points, lambda name: _end_process(name, Path(folder) if folder else None))


def _raise(name: str) -> None:
    raise Killed(name)


def _end_process(name: str, once: Path | None) -> None:
    if once is not None:
        try:
            (once / name.replace("/", ".")).touch(exist_ok=False)
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)


_armed: Armed | None = from_environment(os.environ)
