"""Conducts a run by its three components, epoch by epoch, as NAT does."""

from rollstream.harness.config_file import Loaded
from rollstream.harness.display import Display
from rollstream.harness.finetune_config import block_of, is_ours
from rollstream.harness.progress import Progress
from rollstream.harness.surroundings import Connected, Held, Opening
from rollstream.schemas.errors import ConfigError


def is_classic(loaded: Loaded) -> bool:
    """Whether components conduct the run: one of them is not ours, or ours submit without staleness."""
    blocks = [block_of(loaded.finetune, role) for role in ("trainer", "trajectory_builder", "trainer_adapter")]
    config = loaded.config
    is_on_policy = config.trainer.planning == "submitted" and config.adapter.max_staleness == 0
    return is_on_policy or not all(map(is_ours, blocks))


async def conduct(opening: Opening, around: Held, run: Connected, display: Display) -> Progress:
    """Not yet."""
    raise ConfigError("trainers: planning 'submitted' is not available yet")
