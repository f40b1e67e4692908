"""A program of its own for each rollout: real processes, which get URL and key of their rollout and end with it."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.rollout.registry import environment
from rollstream.schemas.errors import ConfigError, NotAllowedError
from rollstream.schemas.events import RolloutEnded, RolloutFailed
from rollstream.schemas.permissions import NOTHING, Permissions, check_entry
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import play_outside

GUARD = Path(__file__).parents[3] / "producers/environments/program_guard.py"
PLAYS = """
import json, os, sys, urllib.request
def post(url, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as answer:
        return json.load(answer)
task = json.loads(sys.stdin.read())
assert task == json.loads(os.environ["ROLLSTREAM_TASK"])
asked = [{"role": "user", "content": task["inputs"]["question"]}]
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said = post(url, {"model": os.environ["OPENAI_MODEL"], "messages": asked})["choices"][0]["message"]["content"]
post(os.environ["ROLLSTREAM_ROLLOUT_URL"] + "/reward", {"value": float(said == "7")})
"""


def python(folder: Path, code: str) -> str:
    """A command that runs some Python."""
    path = folder / "agent.py"
    path.write_text(code)
    return f"command:{shlex.quote(sys.executable)} {shlex.quote(str(path))}"


def ends(folder, code, **settings):
    settings.setdefault("rollout_timeout_s", 20.0)
    return play_outside(folder, environment=python(folder, code), missing_score="unneeded", **settings)


def is_gone(pid):
    """Whether a process has ended, waiting for it."""
    for _ in range(1000):
        try:
            os.kill(pid, 0)
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_a_program_plays_its_rollout_by_the_variables_that_it_gets(tmp_path):
    played = play_outside(
        tmp_path, environment=python(tmp_path, PLAYS), script=answers("7"), inputs={"question": "3+4=?"}
    )
    played.assert_complete()
    assert [reward.value for reward in played.rewards] == [1.0]
    assert len(played.steps) == 1


def test_a_crash_fails_the_rollout_with_the_last_lines_and_without_the_key(tmp_path):
    code = "import os, sys\nprint(os.environ['OPENAI_API_KEY'])\nprint('nothing to do')\nsys.exit(3)"
    last = ends(tmp_path, code).last
    assert isinstance(last, RolloutFailed)
    assert last.cause == "environment_error"
    assert "the program ended with exit code 3: (key) | nothing to do" in last.message


def test_a_secret_that_a_program_prints_enters_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "s3cr3t-value")  # from a file, say: it gets no variable of this name
    last = ends(tmp_path, "import sys\nprint('s3cr3t-value ' * 999)\nsys.exit(3)").last
    assert isinstance(last, RolloutFailed)
    assert "${MY_SECRET}" in last.message
    assert not re.search("3cr3t|value", last.message)


def test_a_program_that_was_killed_or_not_found_fails_with_the_reason(tmp_path):
    killed = ends(tmp_path, "import os\nos.kill(os.getpid(), 9)").last
    assert isinstance(killed, RolloutFailed)
    assert "signal SIGKILL" in killed.message
    unnamed = ends(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGRTMIN + 1)").last
    assert isinstance(unnamed, RolloutFailed)
    assert f"signal {signal.SIGRTMIN + 1}: (no output)" in unnamed.message
    missing = play_outside(tmp_path, environment="command:no-such-program").last
    assert isinstance(missing, RolloutFailed)
    assert "no-such-program: No such file or directory" in missing.message


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_reports_a_failure_has_failed_whatever_its_exit_code_is(tmp_path, code):
    report = 'post(os.environ["ROLLSTREAM_ROLLOUT_URL"] + "/end", {"error": "no tool answers"})'
    last = play_outside(
        tmp_path, environment=python(tmp_path, f"{PLAYS}\n{report}\nsys.exit({code})"), inputs={"question": "3+4=?"}
    ).last
    assert isinstance(last, RolloutFailed)
    assert last.message.endswith("the agent reported: no tool answers")


def test_a_report_of_failure_counts_though_the_program_does_not_wait_for_its_answer(tmp_path):
    code = (
        "import json, os, socket, sys, urllib.parse\n"
        "url = urllib.parse.urlsplit(os.environ['ROLLSTREAM_ROLLOUT_URL'])\n"
        "body = json.dumps({'error': 'gave up'}).encode()\n"
        "head = f'POST {url.path}/end HTTP/1.1\\r\\nHost: {url.netloc}\\r\\nContent-Length: {len(body)}\\r\\n'\n"
        "head += 'Content-Type: application/json\\r\\nX-Api-Key: ' + os.environ['OPENAI_API_KEY'] + '\\r\\n\\r\\n'\n"
        "with socket.create_connection((url.hostname, url.port)) as sock: sock.sendall(head.encode() + body)\n"
    )
    last = ends(tmp_path, code).last
    assert isinstance(last, RolloutFailed)
    assert last.message.endswith("the agent reported: gave up")


def test_secrets_of_the_process_do_not_reach_a_program(tmp_path, monkeypatch):
    monkeypatch.setenv("KAFKA_PASSWORD", "hidden")
    assert isinstance(ends(tmp_path, "import os\nassert 'KAFKA_PASSWORD' not in os.environ").last, RolloutEnded)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_ignores_no_signal_and_leaves_no_core(tmp_path):
    line = "ulimit -c; grep SigIgn /proc/self/status; exit 3"
    last = play_outside(tmp_path, environment=f"command:sh -c {shlex.quote(line)}").last
    assert isinstance(last, RolloutFailed)
    found = re.search(r"exit code 3: 0 \| SigIgn:\s+([0-9a-f]{16})$", last.message)
    assert found is not None
    of_the_c_library = 0b11 << 31  # signals 32 and 33, which nobody can set but whoever started the tests
    by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    inherited = sum(
        1 << (one - 1) for one in signal.valid_signals() - by_python if signal.getsignal(one) == signal.SIG_IGN
    )
    assert int(found[1], 16) & ~(of_the_c_library | inherited) == 0  # such as those of nohup


def test_memory_and_output_have_limits(tmp_path):
    limits = {"environment_config": {"memory_mb": 128, "max_output_mb": 1}}
    hungry = ends(tmp_path, "held = bytearray(512 * 1024 * 1024)", **limits).last
    assert isinstance(hungry, RolloutFailed)
    assert "MemoryError" in hungry.message
    loud = ends(tmp_path, "while True: print('x' * 1000)", **limits).last
    assert isinstance(loud, RolloutFailed)
    assert "max_output_mb" in loud.message


def test_a_program_ends_with_its_time_and_what_it_started_with_it(tmp_path):
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(1000)"
    )
    last = ends(tmp_path, code, rollout_timeout_s=6.0).last
    assert isinstance(last, RolloutFailed)
    assert last.cause == "timeout"
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


DETACHES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            with open(sys.argv[1], "a") as pids:
                pids.write(f"{os.getpid()}\\n")
            time.sleep(1000)
    time.sleep(1000)
while not os.path.exists(sys.argv[1]) or len(open(sys.argv[1]).readlines()) < 3:
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("stays_s", [0, 1000])
def test_processes_detached_by_setsid_end_with_their_rollout_or_its_timeout(tmp_path, stays_s):
    pids = tmp_path / "pids"
    command = f"{python(tmp_path, DETACHES)} {shlex.quote(str(pids))} {stays_s}"
    limit_s = 6.0 if stays_s else 60.0
    last = play_outside(tmp_path, environment=command, missing_score="unneeded", rollout_timeout_s=limit_s).last
    assert isinstance(last, RolloutFailed if stays_s else RolloutEnded)
    found = pids.read_text().split()
    assert len(found) == 3
    assert all(is_gone(int(pid)) for pid in found)


@pytest.mark.parametrize(
    ("lower", "memory_mb", "expected"), [("ulimit -d 1048576; ", 4096, 1048576), ("", 1 << 60, None)]
)
def test_the_memory_limit_is_at_most_the_hard_one(lower, memory_mb, expected):
    guarded = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(memory_mb), "sh", "-c", "ulimit -Hd"]
    command = ["sh", "-c", f"{lower}exec {shlex.join(guarded)}"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert expected is None or int(found.stdout) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_program_and_what_it_started_die_with_a_producer_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    line = f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child == 0:
            os.execv(
                sys.executable, [sys.executable, "-I", "-S", str(GUARD), str(os.getppid()), "1000", "sh", "-c", line]
            )
        time.sleep(1000)
    while not pids.exists():
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_a_command_must_be_allowed_word_for_word():
    name = "command:python agent.py"
    check_entry(name)
    allowed: Any = environment(name, Permissions(frozenset({name})))
    assert allowed.PROGRAM == ("python", "agent.py")
    for other in ("command:python agent.py --more", "command:python", "command:"):
        with pytest.raises(NotAllowedError):
            environment(other, Permissions(frozenset({name})))
    with pytest.raises(NotAllowedError):
        environment(name, NOTHING)


def test_an_invalid_command_line_is_refused():
    for line, why in (("command:", "names no program"), ("command:echo 'a", "quote its arguments")):
        with pytest.raises(ConfigError, match=why):
            environment(line, Permissions(frozenset({line})))
