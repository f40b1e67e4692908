"""The builder of a run whose agent is a NAT workflow: NAT runs each task, producers write its steps to the log.

A task therefore runs before it is written, and its inputs contain the resulting rollouts, as those of recorded rollouts
do.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollstream.eventlog.files import read_json
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.config import nat_workflows
from rollstream.harness.config.dataset import Example
from rollstream.harness.config.jobs import ENDPOINT
from rollstream.harness.config.nat_workflows import config_of
from rollstream.harness.config.resolve import block_of
from rollstream.harness.nat.nat_runtime import Failures, Played, workflow
from rollstream.harness.recorded.tasks import all_stored, inputs_of
from rollstream.harness.runs.preflight import token_of
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.harness.services.addresses import url_host
from rollstream.producers.traces.spans import Selection, json_value, recorded_steps
from rollstream.schemas.errors import describe
from rollstream.schemas.events import TaskRequested
from rollstream.schemas.events.recorded import RecordedGroup, RecordedReward, RecordedRollout

NO_KEY = "unused"
"""The API key of an endpoint that asks for none: OpenAI's client needs one."""
POLL_S = 0.2
logger = logging.getLogger(__name__)


class NatWorkflowBuilder(RollstreamTrajectoryBuilder):
    """Runs tasks with NAT's runtime in this process; llms of the model in training use the endpoint."""

    def __init__(self, trajectory_builder_config: Any) -> None:
        super().__init__(trajectory_builder_config)
        self._failures = Failures()

    async def prepared(self, handle: RunHandle, tasks: Sequence[TaskRequested]) -> Sequence[TaskRequested]:
        """Run the tasks. Raises RunFailedError if the run ends first, ConfigError if NAT cannot build the workflow."""
        examples = [Example(task.example_id, task.inputs) for task in tasks]
        generations = await handle.during(self._play(handle, tasks, examples))
        selection = self._selection(handle)
        groups = await handle.during(all_stored(_groups(examples, generations, selection), handle.artifacts))
        return [task.model_copy(update={"inputs": inputs_of(group)}) for task, group in zip(tasks, groups, strict=True)]

    async def _play(
        self, handle: RunHandle, tasks: Sequence[TaskRequested], examples: Sequence[Example]
    ) -> list[list[Played]]:
        """The result of each example, by generation. One whose workflow failed is played again, up to `max_attempts`
        times in all, at the address that the endpoint has then.
        """
        reward = handle.config.finetuning.reward_function
        assert reward is not None
        settings, num = tasks[0].settings, max(task.num_rollouts for task in tasks)
        found: list[dict[int, Played]] = [{} for _ in range(num)]
        left = [list(range(len(examples)))] * num
        for _ in range(settings.max_attempts):
            sections = await self._sections(handle)
            async with workflow(config_of(sections), self._failures, settings.rollout_timeout_s) as built:
                plays = [built.play([examples[at] for at in indices], reward.name) for indices in left]
                for one, indices, played in zip(found, left, await asyncio.gather(*plays), strict=True):
                    one.update(zip(indices, played, strict=True))
            left = [[at for at, played in one.items() if played.error is not None] for one in found]
            if not any(left):
                break
        return [[one[at] for at in range(len(examples))] for one in found]

    async def _sections(self, handle: RunHandle) -> dict[str, Any]:
        """The sections for NAT, with the llms of the model in training directed to the endpoint's current address."""
        base_url = await reachable(handle.workspace / f"{ENDPOINT}.json")
        sections = nat_workflows.sections_of(self._file())
        key = token_of(handle.config, handle.workspace, os.environ) or NO_KEY
        for name, model in self._called(handle).names.items():
            sections["llms"][name].pop("model", None)  # an alias of `model_name` that would take precedence
            sections["llms"][name] |= {"base_url": base_url, "api_key": key, "model_name": model, "logprobs": True}
        return sections

    def _called(self, handle: RunHandle) -> nat_workflows.Called:
        """The model's names at its endpoint; it accepts both."""
        assert self.run_config is not None
        assert handle.config.served is not None
        llms = nat_workflows.trained_llms(self._file(), block_of(self.run_config, "trainer_adapter"))
        names = handle.config.served.model_name, handle.spec.model_group
        return nat_workflows.called(llms, handle.config.finetuning.target_model, *names)

    def _selection(self, handle: RunHandle) -> Selection:
        """The calls to train on. `target_model` is the model's name in the file or in the workflow's steps."""
        functions = frozenset(handle.config.finetuning.target_functions)
        return Selection(target_functions=functions, target_model=self._called(handle).target)

    def _file(self) -> Any:
        """The run's file, in validations too."""
        assert self.run_config is not None
        assert self.run_config.run_configuration is not None
        return self.run_config.run_configuration.config_file


async def reachable(file: Path) -> str:
    """The URL of the endpoint with this address file, once it takes connections: it may have to be started again.

    Whoever waits ends with the run, which looks after its services.
    """
    is_told = False
    while True:
        address = read_json(file)
        if address.get("pid"):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(url_host(address["host"]).strip("[]"), address["port"])
                writer.close()
                return f"http://{url_host(address['host'])}:{address['port']}/v1"
        if not is_told:
            logger.warning("waiting for the endpoint: %s names none that can be reached", file)
        is_told = True
        await asyncio.sleep(POLL_S)


def _groups(
    examples: Sequence[Example], generations: Sequence[Sequence[Played]], selection: Selection
) -> list[RecordedGroup]:
    """One group per example, with all its generations."""
    return [
        RecordedGroup.of(
            example.example_id,
            [_rollout(f"{example.example_id}/{n}", played[at], selection) for n, played in enumerate(generations)],
            dict(example.inputs),
        )
        for at, example in enumerate(examples)
    ]


def _rollout(name: str, played: Played, selection: Selection) -> RecordedRollout:
    if played.error is not None:
        return RecordedRollout(source_id=name, error=played.error)
    rewards = () if played.score is None else (RecordedReward(value=played.score),)
    try:
        steps = tuple(recorded_steps(played.steps, selection))
    except (TypeError, ValueError) as error:  # of values that a log cannot hold
        return RecordedRollout(source_id=name, error=f"the steps cannot be recorded: {describe(error)}")
    missing_score = None if played.missing_score is None else json_value(played.missing_score)
    return RecordedRollout(source_id=name, steps=steps, rewards=rewards, missing_score=missing_score)
