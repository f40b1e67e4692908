"""The three components as NAT's: they take and return its data models, and its configuration is repaired first.

A run on the log ends with its trainer's `run`, with the same outcome (`conducted.py`). For another package's trainer,
which knows nothing of runs, our adapter ends the run and closes everything when the process exits.
"""

import asyncio
import atexit
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from nat.finetuning.interfaces.finetuning_runner import Trainer
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder

from rollstream.harness.components.adapter import RUN_NAME, RollstreamTrainerAdapter
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.components.run_completion import watch_curriculum
from rollstream.harness.components.trainer import RollstreamTrainer
from rollstream.harness.config.file import Loaded
from rollstream.harness.config.resolve import block_of, is_ours
from rollstream.harness.nat.command import run_name
from rollstream.harness.nat.conducted import conducted, failed
from rollstream.harness.nat.endpoint_key import give_key, warn_of_models_elsewhere
from rollstream.harness.nat.handover import (
    as_nats,
    as_ours,
    check_packages,
    complete,
    conceal_command,
    loaded_of,
    repair,
)
from rollstream.harness.runs.run_handle import RunHandle, open_handle, opened
from rollstream.harness.services.concealing import conceal_and_escape
from rollstream.producers.rollout.user_code import find_users_modules, import_installed
from rollstream.schemas.errors import RunFailedError, describe
from rollstream.schemas.finetuning import TrainingStatusEnum

TRANSLATED = ("finalize", "submit", "status", "wait_until_complete")
"""Methods that take or give data models."""

logger = logging.getLogger(__name__)


@TrajectoryBuilder.register
class NatTrajectoryBuilder(RollstreamTrajectoryBuilder):
    """Our builder."""

    gives: Callable[[Any], Any] = staticmethod(as_nats)
    """The conversion of the data models that it returns."""

    async def initialize(self, run_config: Any) -> None:
        """Initialize like the base class. Raises ConfigError."""
        _prepare(run_config)
        await super().initialize(run_config)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> Any:
        """Finalize like the base class, and return NAT's models."""
        return self.gives(await super().finalize(run_id, meta))


@TrainerAdapter.register
class NatTrainerAdapter(RollstreamTrainerAdapter):
    """Our adapter."""

    gives: Callable[[Any], Any] = staticmethod(as_nats)
    """The conversion of the data models that it returns."""

    def __init__(self, adapter_config: Any, builder: Any = None) -> None:
        """`builder`: NAT's, which knows the trainer; without it, only our own trainer ends the run."""
        super().__init__(adapter_config)
        self._builder = builder

    def loaded(self, run_config: Any) -> Loaded:
        """The stored configuration keeps `${ENV}` as written."""
        return loaded_of(run_config)

    async def initialize(self, run_config: Any) -> None:
        """Initialize like the base class; opens the run if it is not open. Raises RollstreamError."""
        _prepare(run_config)
        if opened(self._workspace) is None:
            handle = await open_handle(self.loaded(run_config), self._workspace, run_name() or RUN_NAME)
            close_at_exit(handle)
            if not is_ours(block_of(run_config, "trainer")):
                await self._end_with_trainer(run_config, handle)
        await super().initialize(run_config)
        config = self._handle().config
        give_key(run_config, config, self._workspace, os.environ)
        if not is_ours(block_of(run_config, "trajectory_builder")):
            warn_of_models_elsewhere(run_config, config)

    async def submit(self, trajectories: Any) -> Any:
        """Submit like the base class, and return NAT's models."""
        return self.gives(await super().submit(as_ours(trajectories)))

    async def status(self, ref: Any) -> Any:
        """Return the status like the base class, in NAT's models."""
        return self.gives(await super().status(as_ours(ref)))

    async def wait_until_complete(self, ref: Any, poll_interval: float = 10.0) -> Any:
        """Wait like the base class, and return NAT's models."""
        return self.gives(await super().wait_until_complete(as_ours(ref), poll_interval))

    @property
    def own_run(self) -> RunHandle | None:
        """The handle of a run that was opened here."""
        handle = opened(self._workspace)
        return handle if handle is not None and handle.is_own else None

    async def _end_with_trainer(self, run_config: Any, handle: RunHandle) -> None:
        """Have another package's trainer end the run on the log with its own `run`."""
        if self._builder is None:
            return
        parts = await self._builder.get_trajectory_builder(run_config.trajectory_builder)
        trainer = await self._builder.get_trainer(run_config.trainer, parts, self)
        trainer.run = functools.partial(_run, handle, trainer.run)
        watch_curriculum(handle, trainer)


@Trainer.register
class NatTrainer(RollstreamTrainer):
    """Our trainer. Exchanges NAT's models with components of other packages, and our models with ours."""

    async def bind_components(self, trajectory_builder: Any, trainer_adapter: Any) -> None:
        """Bind the two other components."""
        await super().bind_components(_in_ours(trajectory_builder), _in_ours(trainer_adapter))

    async def initialize(self, run_config: Any) -> None:
        """Initialize like the base class. Raises RollstreamError."""
        _prepare(run_config)
        await super().initialize(run_config)

    async def run(self, num_epochs: int) -> Any:
        """Run like the base class.

        Raises RunFailedError if a job failed or nothing was trained, because NAT's command would exit with status 0.
        """
        adapter = self.trainer_adapter
        handle = adapter.own_run if isinstance(adapter, NatTrainerAdapter) else None
        if handle is not None:
            return as_nats(await conducted(handle, super().run(num_epochs)))
        statuses = await super().run(num_epochs)
        for status in statuses:
            if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
                raise RunFailedError(conceal_and_escape(f"run {status.run_id} {status.status.value}: {status.message}"))
        if statuses and not self.reward_history:
            raise RunFailedError(
                f"run {statuses[0].run_id} failed: the rollouts of its {len(statuses)} epochs produced no "
                "trajectories; the log says why"
            )
        return as_nats(statuses)


async def _run(handle: RunHandle, run: Callable[[int], Any], num_epochs: int) -> Any:
    """The `run` of another package's trainer, which ends the run on the log."""
    return await conducted(handle, run(num_epochs))


class _Translated:
    """A component of another package whose methods take and return our models."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in TRANSLATED:
            return value

        async def call(*arguments: Any, **named: Any) -> Any:
            nats = {key: as_nats(argument) for key, argument in named.items()}
            return as_ours(await value(*map(as_nats, arguments), **nats))

        return call


def _in_ours(component: Any) -> Any:
    if not isinstance(component, NatTrajectoryBuilder | NatTrainerAdapter):
        return _Translated(component)
    component.gives = as_ours
    return component


def _prepare(run_config: Any) -> None:
    """Prepare a run of `nat finetune`: add its folder to the module path, conceal its secrets in logs, repair NAT's
    configuration, and check the packages of NAT's evaluation if the builder runs it. Raises ConfigError.
    """
    find_users_modules()
    conceal_command()
    repair(run_config)
    import_installed()
    complete(run_config)
    if not is_ours(block_of(run_config, "trajectory_builder")):
        check_packages(run_config)


def close_at_exit(handle: RunHandle) -> None:
    """Close a run handle when its event loop ends, or at process exit if the loop is never closed."""
    loop = asyncio.get_running_loop()
    guard = asyncio.create_task(_guard(handle, asyncio.current_task()))

    def close() -> None:
        if not loop.is_closed():
            guard.cancel()
            try:
                loop.run_until_complete(guard)
            except asyncio.CancelledError:
                pass
            except Exception as error:  # noqa: BLE001 -- Python's thread pools are shut down by now
                logger.warning("run %s is not closed in order: %s", handle.run.started.run_id, describe(error))

    atexit.register(close)


async def _guard(handle: RunHandle, command: "asyncio.Task[Any] | None") -> None:
    """Close a run handle once this is cancelled. If the command failed before its trainer ran, fail the run too."""
    try:
        await asyncio.Event().wait()
    finally:
        try:
            error = command.exception() if command is not None and command.done() and not command.cancelled() else None
            if isinstance(error, Exception) and not handle.is_finished and not handle.is_over:
                await failed(handle, error)
        finally:
            await handle.close()
