"""The user's side: configuration, registry, trainer, supervisor, command line.

Names are imported when they are used, so that importing this package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.harness.components.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
    from rollstream.harness.config.registry import (
        register_trainer,
        register_trainer_adapter,
        register_trajectory_builder,
    )
    from rollstream.harness.recorded.openai_messages import parse_to_openai_messages
    from rollstream.producers.rollout.registry import register_environment, register_reward

_MODULES = {
    "Trainer": "rollstream.harness.components.interfaces",
    "TrainerAdapter": "rollstream.harness.components.interfaces",
    "TrajectoryBuilder": "rollstream.harness.components.interfaces",
    "parse_to_openai_messages": "rollstream.harness.recorded.openai_messages",
    "register_environment": "rollstream.producers.rollout.registry",
    "register_reward": "rollstream.producers.rollout.registry",
    "register_trainer": "rollstream.harness.config.registry",
    "register_trainer_adapter": "rollstream.harness.config.registry",
    "register_trajectory_builder": "rollstream.harness.config.registry",
}

__all__ = [
    "Trainer",
    "TrainerAdapter",
    "TrajectoryBuilder",
    "parse_to_openai_messages",
    "register_environment",
    "register_reward",
    "register_trainer",
    "register_trainer_adapter",
    "register_trajectory_builder",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
