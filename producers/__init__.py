"""Tasks in, steps out: environments, rewards, rollout engines and the rollout worker.

Names are imported when they are used, so that importing this package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.producers import group_execution, league, service, takeover, user_tasks
    from rollstream.producers.attempt import run_rollout
    from rollstream.producers.engines.base import Capabilities, Engine, EngineKind, Generation, GenerationRequest
    from rollstream.producers.engines.scripted import ScriptedEngine
    from rollstream.producers.gateway.rollout_client import GatewayClient, RemoteRollout
    from rollstream.producers.rollout.environment import Environment
    from rollstream.producers.rollout.rewards import FinishedRollout
    from rollstream.producers.rollout.session import Message, Session

_MODULES = {
    **dict.fromkeys(
        ("Capabilities", "Engine", "EngineKind", "Generation", "GenerationRequest"),
        "rollstream.producers.engines.base",
    ),
    "Environment": "rollstream.producers.rollout.environment",
    "FinishedRollout": "rollstream.producers.rollout.rewards",
    **dict.fromkeys(("GatewayClient", "RemoteRollout"), "rollstream.producers.gateway.rollout_client"),
    "Message": "rollstream.producers.rollout.session",
    "ScriptedEngine": "rollstream.producers.engines.scripted",
    "Session": "rollstream.producers.rollout.session",
    "run_rollout": "rollstream.producers.attempt",
}

__all__ = [
    "Capabilities",
    "Engine",
    "EngineKind",
    "Environment",
    "FinishedRollout",
    "GatewayClient",
    "Generation",
    "GenerationRequest",
    "Message",
    "RemoteRollout",
    "ScriptedEngine",
    "Session",
    "group_execution",
    "league",
    "run_rollout",
    "service",
    "takeover",
    "user_tasks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
