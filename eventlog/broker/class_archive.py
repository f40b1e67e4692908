"""A class-data sharing (CDS) archive of the broker's classes, next to Kafka's jars, which halves the CPU time of a
start. The first broker lists the classes that it loads, the second start creates the archive once, and all later ones
map it. The Java runtime ignores an archive of another runtime or other jars; on a damaged one it may crash, and then
the archive is removed. Errors here never prevent a broker from starting.
"""

import fcntl
import hashlib
import logging
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollstream.eventlog.files import beside, write_whole

DUMP_TIMEOUT_S = 120.0
UNUSED_DAYS = 30
"""Age at which an unused archive (64 MB, one for each Java runtime) is removed when another is made."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClassArchive:
    """The archive in a folder for one Java runtime with its options and jars."""

    folder: Path
    java: Path
    classpath: str
    java_options: tuple[str, ...] = ()
    """Options of the runtime. An archive made with another heap size may not fit, and by default a heap grows with the
    machine.
    """

    @property
    def path(self) -> Path:
        """Path of the archive, which may not exist yet."""
        parts = [self.java, *map(Path, self.classpath.split(os.pathsep))]
        made_for = [(str(part), part.stat().st_mtime_ns if part.exists() else 0) for part in parts]
        digest = hashlib.sha256(repr((made_for, self.java_options)).encode()).hexdigest()
        return self.folder / f"classes-{digest[:12]}.jsa"

    def options(self, listed: Path) -> list[str]:
        """Options of the Java runtime for one broker: the archive, or `listed`, the file to write the class list to."""
        archive = self.path
        if not archive.exists() and archive.with_suffix(".txt").exists():
            self._make(archive)
        if not archive.exists():
            return [f"-XX:DumpLoadedClassList={listed}"]
        with suppress(OSError):
            os.utime(archive)  # the archive is in use
        return [f"-XX:SharedArchiveFile={archive}"]

    def remember(self, listed: Path) -> None:
        """Keep a broker's class list, if it wrote one, for the archive that the next start creates."""
        if not listed.exists():
            return
        try:
            write_whole(self.path.with_suffix(".txt"), listed.read_bytes(), is_synced=False, is_private=False)
            listed.unlink()
        except OSError as error:
            logger.warning("cannot save the list of Apache Kafka's classes, so brokers start more slowly: %s", error)

    def throw_away(self) -> bool:
        """Remove an archive that crashed the Java runtime; the next start creates a new one.

        Returns whether there was one.
        """
        return _remove(self.path)

    def _make(self, archive: Path) -> None:
        names = archive.with_suffix(".txt")
        try:
            with archive.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not archive.exists():
                    with beside(archive, is_alone=True) as temporary:
                        self._dump(names, temporary)
                    self._tidy()
        except (subprocess.SubprocessError, OSError) as error:
            logger.warning(
                "cannot create the archive of Apache Kafka's classes, so brokers start more slowly: %s", error
            )
            _remove(names)  # the next broker lists them again

    def _dump(self, names: Path, temporary: Path) -> None:
        logger.info("creating an archive of Apache Kafka's classes (once): %s", temporary)
        command = [str(self.java), *self.java_options, "-Xshare:dump", f"-XX:SharedClassListFile={names}"]
        command += [f"-XX:SharedArchiveFile={temporary}", "-cp", self.classpath]
        subprocess.run(command, capture_output=True, check=True, timeout=DUMP_TIMEOUT_S)

    def _tidy(self) -> None:
        unused_since = time.time() - UNUSED_DAYS * 86_400
        for archive in self.folder.glob("classes-*.jsa"):
            if archive.stat().st_mtime < unused_since:
                for path in (archive, archive.with_suffix(".txt"), archive.with_suffix(".lock")):
                    _remove(path)


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
