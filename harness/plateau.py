"""Whether a run's validation has stopped getting better. Pure."""

from collections.abc import Sequence

from rollstream.schemas.config import EarlyStopping


def is_plateau(rewards: Sequence[float], settings: EarlyStopping | None) -> bool:
    """Whether the last `patience` of these mean rewards, in order, were no better than the best one before them."""
    if settings is None or not rewards:
        return False
    best, num_worse = rewards[0], 0
    for reward in rewards[1:]:
        if reward > best + settings.min_delta:
            best, num_worse = reward, 0
        else:
            num_worse += 1
    return num_worse >= settings.patience
