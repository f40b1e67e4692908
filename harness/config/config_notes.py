"""What a configuration holds that is accepted though it hardly means what it says: told once in a process."""

import logging
from collections.abc import Sequence

_logger = logging.getLogger(__name__)
_told: set[str] = set()


def tell_meaningless(place: str, names: Sequence[str], why: str) -> None:
    """Warn of keys at a place (a path or a `_type`) that are accepted and ignored. Says nothing without names."""
    if names:
        tell(f"{place}: {', '.join(names)}: accepted, but without a meaning here ({why})")


def tell(message: str) -> None:
    """Warn, once."""
    if message not in _told:
        _told.add(message)
        _logger.warning("%s", message)


def forget() -> None:
    """Tell everything again from now on."""
    _told.clear()
