"""Builds the three registered components of a run and closes them at its end.

An exception of a component as one line: the component, the message, and the position in its code.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.harness.components.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from rollstream.harness.config import registry
from rollstream.harness.config.components import OurAdapterFields, OurBuilderFields
from rollstream.harness.config.resolve import block_of
from rollstream.schemas import errors
from rollstream.schemas.errors import ComponentError, ConfigError, RollstreamError
from rollstream.schemas.finetuning import FinetuneConfig
from rollstream.schemas.users_code import path_of


class Builder(NamedTuple):
    """The services that a component can use while it is built: the second argument of a registered factory."""

    config: FinetuneConfig
    workspace: Path


class Components(NamedTuple):
    """The three components of a run, not bound to each other yet."""

    trainer: Trainer
    trajectory_builder: TrajectoryBuilder
    trainer_adapter: TrainerAdapter


_KINDS = {"trainer": Trainer, "trajectory_builder": TrajectoryBuilder, "trainer_adapter": TrainerAdapter}


@asynccontextmanager
async def components_of(finetune: FinetuneConfig, workspace: Path) -> AsyncIterator[Components]:
    """The components that `finetune` names.

    The code after their `yield` runs at the end of the run. Adapter, builder and trainer are built in this order and
    closed in reverse, even after an error. Built-in blocks and those derived from them get `workspace`, whatever
    the file says. Raises ConfigError naming the path of a block without a registered factory, or whose factory yields
    something else.
    """
    builder = Builder(finetune, workspace)
    async with AsyncExitStack() as held:
        adapter = await _build(held, finetune, "trainer_adapter", builder)
        trajectory_builder = await _build(held, finetune, "trajectory_builder", builder)
        trainer = await _build(held, finetune, "trainer", builder)
        yield Components(trainer, trajectory_builder, adapter)


async def _build(held: AsyncExitStack, finetune: FinetuneConfig, role: str, builder: Builder) -> Any:
    block = block_of(finetune, role)
    _set_workspace(block, builder.workspace)
    location = f"{role}s.{getattr(finetune, role)}"
    build = registry.registered(f"{role}s").get(type(block))
    if build is None:
        raise ConfigError(
            f"{location}: no component is registered for {type(block).__name__}; register one with "
            f"rollstream.harness.register_{role}"
        )
    try:
        with as_component_error(location):
            component = await held.enter_async_context(asynccontextmanager(build)(block, builder))
    except ComponentError as error:
        if str(error.__cause__) != "generator didn't yield":
            raise
        raise ConfigError(f"{location}: {path_of(build)} yields nothing; it must yield one component") from error
    if not isinstance(component, _KINDS[role]):
        found = type(component).__name__
        raise ConfigError(f"{location}: {build.__qualname__} yields a {found}; it must yield a {_KINDS[role].__name__}")
    return component


def _set_workspace(block: Any, workspace: Path) -> None:
    if isinstance(block, OurBuilderFields | OurAdapterFields):
        block.workspace = workspace


_ROLES = {Trainer: "trainer", TrajectoryBuilder: "trajectory_builder", TrainerAdapter: "trainer_adapter"}
logger = logging.getLogger(__name__)


@contextmanager
def as_component_error(location: str, finetune: FinetuneConfig | None = None) -> Iterator[None]:
    """Turns any exception but our own into a ComponentError and logs its traceback; a cancellation, too, that this task
    was not asked for.

    `location`: the block to name; with `finetune`, the block of the component that raised, if it is known.
    """
    try:
        yield
    except RollstreamError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled and errors.is_asked_to_end(asyncio.current_task()):
            raise
        logger.info("a component raised", exc_info=error)
        raised = "cancelled itself; catch CancelledError in it" if is_cancelled else errors.describe(error)
        raise ComponentError(
            f"{_failing_section(finetune, error) or location}: {raised}; rollstream --debug shows the traceback"
        ) from error


def _failing_section(finetune: FinetuneConfig | None, error: BaseException) -> str | None:
    """The block of the innermost component in the traceback."""
    found, step = None, error.__traceback__
    while finetune is not None and step is not None:
        for kind, role in _ROLES.items():
            if isinstance(step.tb_frame.f_locals.get("self"), kind):
                found = f"{role}s.{getattr(finetune, role)}"
        step = step.tb_next
    return found
