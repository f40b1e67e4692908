"""The rollout engine over vLLM servers: LoRA versions without a pause, full weights by reload, admission by proof."""

from rollstream.producers.engines.vllm.child import check_settings
from rollstream.producers.engines.vllm.engine import VllmEngine, build

__all__ = ["VllmEngine", "build", "check_settings"]
