"""A fork of a process that has rollstream's libraries loaded becomes one of its commands."""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn, cast

import setproctitle

from rollstream.harness.services import fork_server
from rollstream.harness.services.serving import CLI

AT_IMPORT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables that libraries read when they are imported."""


def main() -> None:
    """Read the command from standard input, and run it as `python -m` does."""
    given: dict[str, Any] = json.load(sys.stdin)
    for entry in (os.getcwd(), *_folders(os.environ.get("PYTHONPATH", ""))):
        if entry in sys.path:
            sys.path.remove(entry)
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    sys.path[:0] = [os.getcwd(), *_folders(os.environ.get("PYTHONPATH", ""))]
    fork_server.started = forked
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if given["errors"] is not None:
        errors = os.open(given["errors"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(errors, 2)
        os.close(errors)
    for constant, value in given["constants"].items():
        module, _, name = constant.rpartition(".")
        assert name in vars(importlib.import_module(module)), constant
        setattr(sys.modules[module], name, value)
    sys.argv = [CLI, *given["arguments"]]
    setproctitle.setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    _end_with(lambda: runpy.run_module(CLI, run_name="__main__", alter_sys=True))


def _folders(path: str) -> list[str]:
    return path.split(os.pathsep) if path else []


class Forked:
    """A fork server that is a fork of this process, with the attributes of `subprocess.Popen` that are used."""

    def __init__(
        self, modules: Sequence[str], requests: socket.socket, output: BinaryIO, env: Mapping[str, str]
    ) -> None:
        self.pid = os.fork()
        if not self.pid:
            _be_fork_server(modules, (requests.fileno(), output.fileno(), output.fileno()), env)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def forked(
    modules: Sequence[str], requests: socket.socket, output: BinaryIO, env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    return cast("subprocess.Popen[bytes]", Forked(modules, requests, output, env))


def _be_fork_server(modules: Sequence[str], files: Sequence[int], env: Mapping[str, str]) -> NoReturn:
    """Go on as a process with these standard files, which never returns to the command that it was."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in {*files}:
        os.close(file)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(env)
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(os.getcwd()):
            del sys.modules[name]  # the command imported user code to check it
    setproctitle.setproctitle(f"{sys.executable} -m {fork_server.__name__}")
    _end_with(lambda: fork_server.main(modules))


def _end_with(work: Callable[[], object]) -> NoReturn:
    """Do the work, and end without taking the libraries down, some of which tell pages of leaks by then."""
    status: Any = 1
    try:
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:  # noqa: BLE001 -- the process ends here
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
