"""A package for NAT as its users write them: a workflow, an evaluator, a trajectory builder and a trainer.

`test_nat` puts it on the path of `nat finetune` with the metadata of an entry point. The trainer calls the interfaces
in the order of NAT's own ART trainer; the builder reads episodes by NAT's parser, as NAT's own ART builder does.
"""

import asyncio
import uuid
from collections import defaultdict
from typing import Any
from zlib import crc32

from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import (
    register_evaluator,
    register_function,
    register_trainer,
    register_trajectory_builder,
)
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    TrainerConfig,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from nat.data_models.function import FunctionBaseConfig
from nat.finetuning.interfaces.finetuning_runner import Trainer
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder
from nat.finetuning.utils.parsers.base_parser import parse_to_openai_messages
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem


class DigitsConfig(FunctionBaseConfig, name="nat_example_digits"):
    llm_name: LLMRef


@register_function(config_type=DigitsConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def digits(config, builder):
    llm = await builder.get_llm(config.llm_name, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def play(question: str) -> str:
        """Two turns."""
        messages = [("human", question)]
        first = await llm.ainvoke(messages)
        second = await llm.ainvoke([*messages, ("ai", first.content), ("human", "+")])
        return first.content + second.content

    yield FunctionInfo.from_fn(play, description="two turns")


class ShareConfig(EvaluatorBaseConfig, name="nat_example_share"):
    """The share of digits in what was said, and a little by its words: a group of equal rewards trains nothing."""

    fails: bool = False


@register_evaluator(config_type=ShareConfig)
async def share(config, builder):
    async def evaluate(eval_input):
        if config.fails:
            raise RuntimeError("the evaluator fails")
        items = []
        for item in eval_input.eval_input_items:
            output = str(item.output_obj)
            score = (
                sum(character.isdigit() for character in output) / max(1, len(output)) + crc32(output.encode()) / 2**40
            )
            items.append(EvalOutputItem(id=item.id, score=score, reasoning={"said": output}))
        mean = sum(item.score for item in items) / max(1, len(items))
        return EvalOutput(average_score=mean, eval_output_items=items)

    # NAT awaits what it declares as a plain function
    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="share of digits")  # pyright: ignore[reportArgumentType]


class ParsingBuilderConfig(TrajectoryBuilderConfig, name="nat_example_builder"):
    num_generations: int = 2


class ParsingBuilder(TrajectoryBuilder):
    """Runs NAT's evaluation `num_generations` times and reads episodes from the steps by NAT's parser."""

    def __init__(self, config: ParsingBuilderConfig):
        super().__init__(trajectory_builder_config=config)
        self.num_generations = config.num_generations
        self.runs = {}

    async def start_run(self, run_id, meta=None):
        if run_id in self.runs:
            raise ValueError(f"Run {run_id} is already in progress.")
        self.runs[run_id] = [asyncio.create_task(self.run_eval()) for _ in range(self.num_generations)]

    async def finalize(self, run_id, meta=None):
        groups, reward = defaultdict(list), self.run_config.reward_function
        assert reward is not None
        for generation, output in enumerate(await asyncio.gather(*self.runs.pop(run_id))):
            scores = dict(output.evaluation_results)[reward.name]
            scored = {item.id: item for item in scores.eval_output_items}
            for item in output.eval_input.eval_input_items:
                groups[item.id].append(
                    Trajectory(
                        episode=[_item(message) for message in parse_to_openai_messages(self._targets(item))],
                        reward=await self.compute_reward(scored[item.id]),
                        metadata={"id": item.id, "run_id": run_id, "generation": generation},
                    )
                )
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def _targets(self, item):
        names = self.run_config.target_functions
        return [step for step in item.trajectory if step.function_ancestry.function_name in names]

    def log_progress(self, run_id, metrics, output_dir=None):
        pass


def _item(message):
    role = EpisodeItemRole(message["role"])
    return EpisodeItem(role=role, content=message["content"], logprobs=message.get("logprobs"))


@register_trajectory_builder(config_type=ParsingBuilderConfig)
async def parsing_builder(config, builder):
    yield ParsingBuilder(config)


class OrderlyTrainerConfig(TrainerConfig, name="nat_example_trainer"):
    empty_from: int | None = None
    """Epoch from which on nothing is submitted, as if a curriculum left nothing."""


class OrderlyTrainer(Trainer):
    """One run id for all epochs; validation, start_run, finalize, submit, wait, in this order, epoch by epoch."""

    async def initialize(self, run_config):
        await super().initialize(run_config)
        assert isinstance(self.trainer_adapter, TrainerAdapter)
        assert isinstance(self.trajectory_builder, TrajectoryBuilder)
        self.run_id = f"orderly_run_{uuid.uuid4().hex[:8]}"
        self.refs = []

    async def run_epoch(self, epoch, run_id) -> Any:
        run = self.run_config.run_configuration
        assert run is not None
        if run.validation_dataset and epoch % run.validation_interval == 0:
            reported = await self.run_validation_evaluation(epoch, run_id)
            print(f"validation {reported}", flush=True)
        meta = {"epoch": epoch, "run_id": run_id, "trainer_config": self.trainer_config.model_dump()}
        await self.trajectory_builder.start_run(run_id, meta)
        collection = await self.trajectory_builder.finalize(run_id, meta)
        config: Any = self.trainer_config
        empty_from = config.empty_from
        if not collection.trajectories or (empty_from is not None and epoch >= empty_from):
            return None
        kept = TrajectoryCollection(trajectories=collection.trajectories, run_id=collection.run_id)
        self.refs.append(await self.trainer_adapter.submit(kept))
        return self.refs[-1]

    async def run(self, num_epochs):
        statuses = []
        for epoch in range(num_epochs):
            ref = await self.run_epoch(epoch, self.run_id)
            if ref is None:
                completed = TrainingStatusEnum.COMPLETED
                statuses.append(TrainingJobStatus(run_id=self.run_id, backend="orderly", status=completed))
                continue
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
            self.trainer_adapter.log_progress(ref, {"epoch": epoch})
            if statuses[-1].status == TrainingStatusEnum.FAILED:
                break
        return statuses

    async def get_metrics(self, run_id):
        return {"statuses": [(await self.trainer_adapter.status(ref)).status.value for ref in self.refs]}

    async def cleanup(self):
        pass

    def log_progress(self, epoch, metrics, output_dir=None):
        pass


@register_trainer(config_type=OrderlyTrainerConfig)
async def orderly_trainer(config, builder):
    yield OrderlyTrainer(trainer_config=config)
