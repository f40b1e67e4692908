"""Position up to which a learner has read the log, kept in a file beside its checkpoints, so that a start continues
there.

The file is a hint: if it is missing or does not fit the log, a start finds its open jobs by `jobs` alone.
"""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rollstream.eventlog.files import write_whole

logger = logging.getLogger(__name__)


class ReadPosition(BaseModel):
    """Next offsets, and the records before them that still count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster_id: str
    model_groups: tuple[str, ...]
    """Those that were served; none: all."""
    next_offsets: dict[str, int]
    """Next offset by topic."""
    anchors: dict[str, list[int]]
    """Offsets, by topic, of records before the next one that the state was made of."""
    first_indexes: dict[str, int]
    """Index by job that is followed: manifests before it are trained and in a checkpoint."""
    groups: tuple[str, ...]
    """Model groups that are followed."""
    cut: dict[str, int] = {}
    """Offsets by topic before the next ones, taken after that of `dlq`: see `letters`. Empty: none are known."""


def load(path: Path) -> ReadPosition | None:
    """The position in a file; None if there is none that can be read."""
    try:
        return ReadPosition.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("position file %s cannot be read and is ignored: %s", path, str(error).splitlines()[0])
        return None


def save(path: Path, position: ReadPosition) -> None:
    """Write it as a whole: after a crash there is the old file or the new one. Raises OSError."""
    write_whole(path, position.model_dump_json(), is_synced=False)
