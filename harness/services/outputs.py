"""Files that a user named for a result: regular ones are replaced, others are written as they are."""

from pathlib import Path

from rollstream.eventlog.disk_space import is_full
from rollstream.eventlog.files import write_whole


def write_output(path: Path, content: str | bytes) -> None:
    """Write a user's file whole or not at all, unless only it can be written: a pipe, or a file mounted alone."""
    data = content.encode() if isinstance(content, str) else content
    if path.is_file() or not path.exists():
        try:
            write_whole(path.resolve(), data, is_private=False)
        except OSError as error:
            if is_full(error):
                raise
        else:
            return
    path.write_bytes(data)
