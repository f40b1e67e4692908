"""Libraries that only an extra installs, and what to say when one of them is missing."""

from importlib.util import find_spec

from rollstream.schemas.errors import ConfigError

OF_LEARNER = ("torch", "transformers", "peft", "safetensors")
"""What rollout engine and learner need; log, processors and metrics do without."""


def check_learner() -> None:
    """Raises ConfigError naming a library of the extra `learner` that is not installed."""
    for library in OF_LEARNER:
        if find_spec(library) is None:
            raise ConfigError(_told(library))


def missing(error: ModuleNotFoundError) -> str | None:
    """What to do about an import that failed for want of an extra, None if it is no matter of an extra."""
    library = (error.name or "").split(".", 1)[0]
    return _told(library) if library in OF_LEARNER else None


def _told(library: str) -> str:
    return f"{library} is not installed, which models need: pip install '.[learner]' in rollstream's checkout"
