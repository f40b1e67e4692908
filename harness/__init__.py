"""What a user touches: configuration, registry, trainer, supervisor, command line.

Names are imported when they are used, so that importing this package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.harness.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
    from rollstream.harness.registry import register_trainer, register_trainer_adapter, register_trajectory_builder
    from rollstream.producers.registry import register_environment, register_reward

_PLACES = {
    "Trainer": "rollstream.harness.interfaces",
    "TrainerAdapter": "rollstream.harness.interfaces",
    "TrajectoryBuilder": "rollstream.harness.interfaces",
    "register_environment": "rollstream.producers.registry",
    "register_reward": "rollstream.producers.registry",
    "register_trainer": "rollstream.harness.registry",
    "register_trainer_adapter": "rollstream.harness.registry",
    "register_trajectory_builder": "rollstream.harness.registry",
}

__all__ = [
    "Trainer",
    "TrainerAdapter",
    "TrajectoryBuilder",
    "register_environment",
    "register_reward",
    "register_trainer",
    "register_trainer_adapter",
    "register_trajectory_builder",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
