"""NAT's own ART trainer and trajectory builder, without its adapter, which alone needs OpenPipe's package.

`run_nat_matrix` puts it on the path of `nat finetune`, beside the unpacked wheel of nvidia-nat-openpipe-art.
"""

import sys
from types import ModuleType, SimpleNamespace

from nat.cli.register_workflow import register_trainer, register_trajectory_builder

ART = ModuleType("art")
ART.dev = SimpleNamespace(InitArgs=dict, EngineArgs=dict, OpenAIServerConfig=dict, TrainerArgs=dict)  # pyright: ignore[reportAttributeAccessIssue]
sys.modules.setdefault("art", ART)

from nat.plugins.openpipe.config import ARTTrainerConfig, ARTTrajectoryBuilderConfig  # noqa: E402  # pyright: ignore
from nat.plugins.openpipe.trainer import ARTTrainer  # noqa: E402  # pyright: ignore
from nat.plugins.openpipe.trajectory_builder import ARTTrajectoryBuilder  # noqa: E402  # pyright: ignore


@register_trainer(config_type=ARTTrainerConfig)
async def art_trainer(config, builder):
    yield ARTTrainer(trainer_config=config)


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_builder(config, builder):
    yield ARTTrajectoryBuilder(trajectory_builder_config=config)
