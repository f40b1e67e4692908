"""`environment: command:PROGRAM ARGUMENTS`: a program of its own for each rollout, with its gateway's URL and key.

Only a process's own settings can allow a command; a record that names another one is refused, and so are arguments in
a record: the whole line is the name. The program's variables are few and fixed (`PASSED`), so that no secret of this
process reaches it.
"""

import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from typing import ClassVar

import orjson

from rollstream.producers.environments import program_guard
from rollstream.producers.environments.gateway import NO_GATEWAY, OutsideEnvironment
from rollstream.producers.rollout.environment import task_of
from rollstream.producers.rollout.gateway_interface import OpenedRollout
from rollstream.producers.rollout.session import Session
from rollstream.schemas.errors import ConfigError, EnvironmentRunError
from rollstream.schemas.permissions import COMMAND
from rollstream.schemas.variables import conceal

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "VIRTUAL_ENV", "SYSTEMROOT")
"""Variables of this process that a program gets."""
MAX_TAIL = 4096
"""Bytes of the output that are kept."""
MAX_OUTPUT_CHARS = 350
"""Characters of it in the message of a failed rollout."""
MAX_VARIABLE = 100_000
"""Bytes of a task that a variable may hold; a larger one is only on standard input."""
LAST_OUTPUT_S = 0.5
"""Seconds for which output is read after the program's exit, if a process that it started holds the pipe."""
GRACE_S = 5.0
"""Seconds that a program may run after it has ended its rollout."""

logger = logging.getLogger(__name__)


class CommandEnvironment(OutsideEnvironment):
    """Runs `PROGRAM` once a rollout; its exit ends the rollout."""

    PROGRAM: ClassVar[tuple[str, ...]] = ()

    def __init__(self, memory_mb: int = 4096, max_output_mb: int = 64, demonstrator: str | None = None) -> None:
        """`memory_mb`: of each process's data; `max_output_mb`: of standard output and error together."""
        super().__init__(demonstrator)
        if memory_mb < 16 or max_output_mb < 1:
            raise ValueError("memory_mb must be at least 16, max_output_mb at least 1")
        self._memory_mb = memory_mb
        self._max_output = max_output_mb * 1024 * 1024

    async def run(self, session: Session) -> None:
        """Run the program. Raises EnvironmentRunError if it reported a failure by `/end`, or with its last lines of
        output if it failed.
        """
        if session.gateway is None:
            raise EnvironmentRunError(NO_GATEWAY)
        async with session.gateway.open(session, session.agents[0], is_claimable=False) as rollout:
            tail, code = await self._run(session, rollout)
            await rollout.finish()
        if code:
            what = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            raise EnvironmentRunError(f"the program ended with {what}: {_last_output(tail, rollout.key)}")

    async def _run(self, session: Session, rollout: OpenedRollout) -> tuple[bytes, int]:
        """The end of the program's output, and its exit code. Raises EnvironmentRunError if there is too much of it."""
        task = orjson.dumps(task_of(session))
        loop = asyncio.get_running_loop()
        transport, output = await loop.subprocess_exec(
            lambda: _Output(self._max_output),
            *(sys.executable, "-I", "-S", program_guard.__file__),
            *(str(os.getpid()), str(self._memory_mb), *self.PROGRAM),
            stderr=asyncio.subprocess.STDOUT,
            env=variables(os.environ, session, rollout, task),
            start_new_session=True,
        )
        ended = asyncio.create_task(_ended(rollout))
        try:
            _feed(transport, task)
            await asyncio.wait({output.done, ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({output.done}, timeout=GRACE_S)
            if output.done.done():
                return output.done.result(), transport.get_returncode() or 0
            return b"", 0
        finally:
            ended.cancel()
            await _stop(transport, output)


class _Output(asyncio.SubprocessProtocol):
    """Output of a program, of which only the last part is kept."""

    def __init__(self, max_bytes: int) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The last bytes, once the program has ended."""
        self.exited = asyncio.Event()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tail = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take a piece of the output."""
        self._num_bytes += len(data)
        self._tail = (self._tail + data)[-MAX_TAIL:]
        if self._num_bytes > self._max_bytes and not self.done.done():
            reason = f"the program wrote more than {self._max_bytes} bytes (environment_config.max_output_mb)"
            self.done.set_exception(EnvironmentRunError(reason))

    def process_exited(self) -> None:
        """The rest of the output follows, unless somebody else holds the pipe."""
        self.exited.set()
        asyncio.get_running_loop().call_later(LAST_OUTPUT_S, self._finish)

    def connection_lost(self, exc: Exception | None) -> None:
        """All is read."""
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(self._tail)


async def _stop(transport: asyncio.SubprocessTransport, output: _Output) -> None:
    """End the program and its child processes, if it has not ended."""
    if output.done.done() and not output.done.cancelled():
        output.done.exception()
    try:
        if transport.get_returncode() is None:
            transport.terminate()  # of the guard, which ends the whole group
            await asyncio.wait_for(output.exited.wait(), GRACE_S)
    except (TimeoutError, ProcessLookupError):
        logger.warning("the guard of a program does not stop pid=%s", transport.get_pid())
    finally:
        transport.close()


def _feed(transport: asyncio.SubprocessTransport, task: bytes) -> None:
    """Write the task to standard input; a program need not read it."""
    pipe = transport.get_pipe_transport(0)
    assert isinstance(pipe, asyncio.WriteTransport)
    pipe.write(task)
    pipe.write_eof()


def environment_of(name: str) -> type[CommandEnvironment]:
    """The environment that runs a command. Raises ConfigError for a line that is not a command."""
    try:
        program = tuple(shlex.split(name.removeprefix(COMMAND)))
    except ValueError as error:
        raise ConfigError(f"environment {name!r}: {error}; quote its arguments as in a shell") from error
    if not program:
        raise ConfigError(f"environment {name!r} names no program; write command:PROGRAM ARGUMENTS")
    return type("CommandEnvironment", (CommandEnvironment,), {"PROGRAM": program, "__module__": __name__})


def variables(env: Mapping[str, str], session: Session, rollout: OpenedRollout, task: bytes) -> dict[str, str]:
    """The environment variables of a program."""
    passed = {name: env[name] for name in PASSED if name in env}
    own = {
        "OPENAI_BASE_URL": f"{rollout.base_url}/v1",
        "OPENAI_API_KEY": rollout.key,
        "OPENAI_MODEL": session.agents[0],
        "ANTHROPIC_BASE_URL": rollout.base_url,
        "ANTHROPIC_API_KEY": rollout.key,
        "ANTHROPIC_MODEL": session.agents[0],
        "ROLLSTREAM_ROLLOUT_URL": rollout.base_url,
        "ROLLSTREAM_ROLLOUT_ID": session.rollout_id,
    }
    return passed | own | ({"ROLLSTREAM_TASK": task.decode()} if len(task) <= MAX_VARIABLE else {})


async def _ended(rollout: OpenedRollout) -> None:
    try:
        await rollout.ended()
    except EnvironmentRunError:
        return  # raised again by `finish`, or as the exit code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        return str(number)


def _last_output(tail: bytes, key: str) -> str:
    """The last lines of an output, without the rollout's key and without secrets."""
    whole = conceal(tail.decode(errors="replace").replace(key, "(key)"))  # before it is cut
    text = " | ".join(line.strip() for line in whole.splitlines() if line.strip())
    return text[-MAX_OUTPUT_CHARS:] if text else "(no output)"
