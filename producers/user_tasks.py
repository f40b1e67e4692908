"""Tasks of user code, and all tasks that they start: one that exits fails itself, and not the process.

asyncio lets SystemExit and KeyboardInterrupt of any task through to whoever runs the event loop, past the tasks that
wait for it.
"""

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from rollstream.schemas.errors import EnvironmentRunError

Result = TypeVar("Result")
_IS_OF_USERS = ContextVar("_IS_OF_USERS", default=False)
"""Whether tasks that are made in a context run user code. They inherit their context."""


def create_task(coroutine: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
    """A task that raises EnvironmentRunError where user code exits, as those do that it starts.

    Signals are the service's, so KeyboardInterrupt is of user code, too.
    """
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    if not isinstance(before, _TaskFactory):
        loop.set_task_factory(_TaskFactory(before))
    context = copy_context()
    context.run(_IS_OF_USERS.set, True)
    return loop.create_task(coroutine, context=context)


class _TaskFactory:
    """The event loop's task factory; others' tasks are as they were without it."""

    def __init__(self, before: Any) -> None:
        self._make = before or _plain_task

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        given: Context | None = options.get("context")
        context = copy_context() if given is None else given  # an empty one is false
        is_of_users = context.get(_IS_OF_USERS, False) and asyncio.iscoroutine(coroutine)
        return self._make(loop, _NoExit(coroutine) if is_of_users else coroutine, **options)


def _plain_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    return asyncio.Task(coroutine, loop=loop, **options)


class _NoExit(Coroutine[Any, Any, Any]):
    """A coroutine that raises EnvironmentRunError where it exits; no frame of its own is in its way."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __getattr__(self, name: str) -> Any:  # its state and name, for tools that inspect a task
        return getattr(self._coroutine, name)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _failure(error) from error

    def throw(self, *raised: Any) -> Any:
        try:
            return self._coroutine.throw(*raised)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _failure(error) from error

    def close(self) -> None:
        self._coroutine.close()


def _failure(error: BaseException) -> EnvironmentRunError:
    what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else "raised KeyboardInterrupt"
    return EnvironmentRunError(what)
