"""An archive of the broker's classes beside Kafka's jars: with it a broker starts in less than half the processor time.

Java's class-data sharing: the first broker lists the classes that it loads, the second start makes the archive of them,
once, and all others map it. The Java runtime passes over an archive that does not fit it or the jars; on a damaged one
it may end, and then the archive is thrown away. Nothing that goes wrong here keeps a broker from starting.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DUMP_TIMEOUT_S = 120.0
UNUSED_DAYS = 30
"""Archives (64 MB) that no broker mapped for so long are removed when one is made: every Java runtime has its own."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClassArchive:
    """The archive in a folder for one Java runtime, its options and jars: it fits no others."""

    folder: Path
    java: Path
    classpath: str
    java_options: tuple[str, ...] = ()
    """With another heap than it was made with an archive may not fit: by default a heap grows with the machine."""

    @property
    def path(self) -> Path:
        """Where it is, once it is made."""
        parts = [self.java, *map(Path, self.classpath.split(os.pathsep))]
        made_for = [(str(part), part.stat().st_mtime_ns if part.exists() else 0) for part in parts]
        digest = hashlib.sha256(repr((made_for, self.java_options)).encode()).hexdigest()
        return self.folder / f"classes-{digest[:12]}.jsa"

    def options(self, listed: Path) -> list[str]:
        """Options of the Java runtime for one broker: the archive, or `listed` as the file to list the classes in."""
        archive = self.path
        if not archive.exists() and archive.with_suffix(".txt").exists():
            self._make(archive)
        if not archive.exists():
            return [f"-XX:DumpLoadedClassList={listed}"]
        with suppress(OSError):
            os.utime(archive)  # it is in use
        return [f"-XX:SharedArchiveFile={archive}"]

    def remember(self, listed: Path) -> None:
        """Keep the classes that a broker listed, if it did, for the archive that the next start makes."""
        if not listed.exists():
            return
        temporary = self.folder / f"classes.{os.getpid()}"
        try:
            shutil.copyfile(listed, temporary)
            temporary.replace(self.path.with_suffix(".txt"))
            listed.unlink()
        except OSError as error:
            _remove(temporary)
            logger.warning("the names of Apache Kafka's classes cannot be kept, so brokers start slower: %s", error)

    def throw_away(self) -> bool:
        """Remove an archive on which the Java runtime ended; the next start makes another. Whether there was one."""
        return _remove(self.path)

    def _make(self, archive: Path) -> None:
        names, temporary = archive.with_suffix(".txt"), archive.with_suffix(".tmp")
        try:
            with archive.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not archive.exists():
                    self._dump(names, temporary)
                    temporary.replace(archive)
                    self._tidy()
        except (subprocess.SubprocessError, OSError) as error:
            logger.warning("no archive of Apache Kafka's classes, so brokers start slower: %s", error)
            _remove(names)  # the next broker lists them anew

    def _dump(self, names: Path, temporary: Path) -> None:
        logger.info("making an archive of Apache Kafka's classes (once): %s", temporary)
        command = [str(self.java), *self.java_options, "-Xshare:dump", f"-XX:SharedClassListFile={names}"]
        command += [f"-XX:SharedArchiveFile={temporary}", "-cp", self.classpath]
        subprocess.run(command, capture_output=True, check=True, timeout=DUMP_TIMEOUT_S)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # a power cut leaves it whole, or not at all

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
