"""The three components as NAT's: its data models go in and come out, and what it hands over is repaired first.

A run that our trainer conducts ends with that trainer. Another trainer knows nothing of runs: then our adapter ends the
run with the last epoch that the configuration asks for, and lets go of everything when the process is done.
"""

import asyncio
import atexit
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from nat.finetuning.interfaces.finetuning_runner import Trainer
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder

from rollstream.harness import run_end
from rollstream.harness.backend import Backend, open_backend, opened
from rollstream.harness.config.config_file import Loaded
from rollstream.harness.config.finetune_config import block_of, is_ours
from rollstream.harness.nat.loaded import loaded_of
from rollstream.harness.nat.models import as_nats, as_ours
from rollstream.harness.nat.repair import check_packages, repair
from rollstream.harness.rollstream_adapter import RUN_NAME, RollstreamTrainerAdapter
from rollstream.harness.rollstream_builder import RollstreamTrajectoryBuilder
from rollstream.harness.rollstream_trainer import RollstreamTrainer
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.finetuning import TrainingJobRef, TrainingStatusEnum

TRANSLATED = ("finalize", "submit", "status", "wait_until_complete")
"""Methods that take or give data models."""


@TrajectoryBuilder.register
class NatTrajectoryBuilder(RollstreamTrajectoryBuilder):
    """Our builder."""

    gives: Callable[[Any], Any] = staticmethod(as_nats)
    """What becomes of the data models that it gives."""

    async def initialize(self, run_config: Any) -> None:
        """As ours. Raises ConfigError."""
        _prepare(run_config)
        await super().initialize(run_config)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> Any:
        """As ours, in NAT's models."""
        return self.gives(await super().finalize(run_id, meta))


@TrainerAdapter.register
class NatTrainerAdapter(RollstreamTrainerAdapter):
    """Our adapter."""

    gives: Callable[[Any], Any] = staticmethod(as_nats)
    """What becomes of the data models that it gives."""
    _last_epoch: int | None = None
    """Of a run that nobody else ends."""

    def loaded(self, run_config: Any) -> Loaded:
        """What is stored of the configuration has `${ENV}` as it was written."""
        return loaded_of(run_config)

    async def initialize(self, run_config: Any) -> None:
        """As ours; opens the run where nobody has. Raises RollstreamError."""
        _prepare(run_config)
        if opened(self._workspace) is None:
            backend = await open_backend(self.loaded(run_config), self._workspace, run_name())
            if not is_ours(block_of(run_config, "trainer")):
                self._last_epoch = run_config.num_epochs - 1
                _close_at_exit(backend)
        await super().initialize(run_config)

    async def submit(self, trajectories: Any) -> Any:
        """As ours, in NAT's models."""
        return self.gives(await super().submit(as_ours(trajectories)))

    async def status(self, ref: Any) -> Any:
        """As ours, in NAT's models."""
        return self.gives(await super().status(as_ours(ref)))

    async def wait_until_complete(self, ref: Any, poll_interval: float = 10.0) -> Any:
        """As ours, in NAT's models. Ends the run after its last epoch, or a failed one, if nobody else will."""
        ours: TrainingJobRef = as_ours(ref)
        found = await super().wait_until_complete(ours, poll_interval)
        if self._last_epoch is not None:
            is_completed = found.status == TrainingStatusEnum.COMPLETED
            if not is_completed or (ours.metadata or {}).get("epoch", -1) >= self._last_epoch:
                await run_end.finish(self._backend(), is_completed=is_completed, message=found.message or "")
        return self.gives(found)


@Trainer.register
class NatTrainer(RollstreamTrainer):
    """Our trainer. Speaks NAT's models with components of other packages, and ours with ours."""

    async def bind_components(self, trajectory_builder: Any, trainer_adapter: Any) -> None:
        """Take the two others."""
        await super().bind_components(_in_ours(trajectory_builder), _in_ours(trainer_adapter))

    async def initialize(self, run_config: Any) -> None:
        """As ours. Raises RollstreamError."""
        _prepare(run_config)
        await super().initialize(run_config)

    async def run(self, num_epochs: int) -> Any:
        """As ours. Raises RunFailedError if a job failed or nothing was rolled out: NAT's command would end well."""
        statuses = await super().run(num_epochs)
        for status in statuses:
            if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
                raise RunFailedError(f"run {status.run_id} {status.status.value}: {status.message}")
        if statuses and not self.reward_history:
            raise RunFailedError(f"run {statuses[0].run_id} failed: no trajectories came of its {len(statuses)} epochs")
        return as_nats(statuses)


class _Translated:
    """A component of another package: models of ours go in as NAT's, and NAT's come out as ours."""

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


def run_name() -> str:
    """Of a new run: that of the command's file."""
    context = click.get_current_context(silent=True)
    file = None if context is None else context.params.get("config_file")
    return RUN_NAME if file is None else Path(file).stem


def _in_ours(component: Any) -> Any:
    if not isinstance(component, NatTrajectoryBuilder | NatTrainerAdapter):
        return _Translated(component)
    component.gives = as_ours
    return component


def _prepare(run_config: Any) -> None:
    """Repair what came; with a builder that runs NAT's evaluation, see that it can. Raises ConfigError."""
    repair(run_config)
    if not is_ours(block_of(run_config, "trajectory_builder")):
        check_packages(run_config)


def _close_at_exit(backend: Backend) -> None:
    """Close a backend in order when its event loop ends, or the process where the loop is only left alone."""
    loop = asyncio.get_running_loop()
    guard = asyncio.create_task(_guard(backend))

    def close() -> None:
        if not loop.is_closed():
            guard.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(guard)

    atexit.register(close)


async def _guard(backend: Backend) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await backend.close()
