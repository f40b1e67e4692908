"""Failpoints: each name is used once, an armed one kills at its hit, an unarmed one costs next to nothing."""

import os
import re
import signal
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from rollstream.eventlog import failpoints
from rollstream.eventlog.failpoints import FAILPOINTS, Killed, armed, failpoint, from_environment
from rollstream.schemas.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NAME = "metrics/after-transaction"


def test_every_name_stands_at_exactly_one_place():
    folders = ("producers", "processors", "learner", "metrics", "harness")
    text = "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert sorted(re.findall(r'failpoint\("([^"]+)"\)', text)) == sorted(FAILPOINTS)


def test_an_armed_point_kills_at_its_hit_and_only_then():
    with armed(NAME, 3) as kill:
        failpoint(NAME)
        failpoint("metrics/inside-transaction")
        failpoint(NAME)
        with pytest.raises(Killed, match=NAME):
            failpoint(NAME)
        failpoint(NAME)
        assert (kill.hits, kill.fired) == ({NAME: 4}, [NAME])
    failpoint(NAME)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with (
        pytest.raises(
            ConfigError, match="failpoint 'metrics/later' does not exist; known failpoints: assemble/after-fold"
        ),
        armed("metrics/later"),
    ):
        pass
    with pytest.raises(ConfigError, match="does not exist"):
        from_environment({failpoints.VARIABLE: f"{NAME}:2,nowhere:1"})
    with pytest.raises(ConfigError, match="write name:n"):
        from_environment({failpoints.VARIABLE: f"{NAME}:soon"})
    with pytest.raises(ConfigError, match="count from 1"):
        from_environment({failpoints.VARIABLE: f"{NAME}:0"})
    assert from_environment({}) is None


@pytest.mark.slow
def test_the_environment_has_a_process_kill_itself_and_once_only_if_a_folder_keeps_that(tmp_path):
    code = (
        f"from rollstream.eventlog.failpoints import failpoint\nfor _ in range(3): failpoint({NAME!r})\nprint('done')"
    )
    env = os.environ | {failpoints.VARIABLE: f"{NAME}:2", failpoints.ONCE: str(tmp_path)}
    first = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    second = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, "")
    assert (second.returncode, second.stdout) == (0, "done\n")


def test_an_unarmed_point_costs_next_to_nothing():
    assert min(timeit.repeat(lambda: failpoint(NAME), number=10_000, repeat=5)) < 0.02
