"""The broker's jars: exactly those of the shipped checksums, fetched whole or not at all."""

import errno
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollstream.eventlog.broker import install as kafka_install
from rollstream.eventlog.broker.install import KAFKA_VERSION, MAX_ATTEMPTS, Jar, install, jars, pinned_jars
from rollstream.eventlog.files import replacing
from rollstream.schemas.errors import BrokerError

WHOLE = bytes(range(256)) * 4096
CHANGED = WHOLE[:-1] + b"?"
JAR = Jar("org/apache/kafka/kafka.jar", hashlib.sha256(WHOLE).hexdigest())


class Repository(ThreadingHTTPServer):
    """Answers each request with the next of its bodies (the last one again and again); None is an error of its own."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.bodies: list[bytes | None] = [WHOLE]
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/maven2"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Repository)
        self.server.asked.append(self.path)
        body = self.server.bodies.pop(0) if len(self.server.bodies) > 1 else self.server.bodies[0]
        self.send_response(200 if body is not None else 503)
        self.send_header("Content-Length", str(len(WHOLE)))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setattr(kafka_install, "PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Repository() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_pinned_set_names_every_jar_with_version_and_checksum() -> None:
    pins = pinned_jars()
    assert len(pins) == len({jar.path for jar in pins}) > 40
    assert f"org/apache/kafka/kafka_2.13/{KAFKA_VERSION}/kafka_2.13-{KAFKA_VERSION}.jar" in {jar.path for jar in pins}
    for jar in pins:
        artifact, version, name = jar.path.split("/")[-3:]
        assert name == f"{artifact}-{version}.jar"
        assert len(bytes.fromhex(jar.sha256)) == 32


def test_a_jar_is_fetched_once(repository: Repository, tmp_path: Path) -> None:
    for _ in range(2):
        assert [path.read_bytes() for path in install(tmp_path, (JAR,), repository.url)] == [WHOLE]
    assert repository.asked == [f"/maven2/{JAR.path}"]
    assert names(tmp_path) == ["kafka.jar"]


@pytest.mark.parametrize("bad", [WHOLE[:1000], b"", CHANGED, None], ids=["cut off", "empty", "changed", "error"])
def test_a_bad_download_is_removed_and_fetched_again(bad: bytes | None, repository: Repository, tmp_path: Path) -> None:
    repository.bodies = [bad, WHOLE]
    assert [path.read_bytes() for path in install(tmp_path, (JAR,), repository.url)] == [WHOLE]
    assert len(repository.asked) == 2
    assert names(tmp_path) == ["kafka.jar"]


@pytest.mark.parametrize(
    ("bad", "reported"),
    [(CHANGED, "wrong checksum: sha256 .*, expected "), (None, "answered 503"), (WHOLE[:1000], "IncompleteRead")],
)
def test_after_a_bounded_number_of_attempts_it_is_one_clear_error(
    bad: bytes | None, reported: str, repository: Repository, tmp_path: Path
) -> None:
    repository.bodies = [bad]
    with pytest.raises(OSError, match=rf"kafka\.jar could not be downloaded in {MAX_ATTEMPTS} attempts: .*{reported}"):
        install(tmp_path, (JAR,), repository.url)
    assert len(repository.asked) == MAX_ATTEMPTS
    assert names(tmp_path) == []


@pytest.mark.parametrize("damaged", [WHOLE[:1000], CHANGED], ids=["cut off", "changed"])
def test_a_damaged_jar_of_the_cache_is_fetched_again(damaged: bytes, repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / JAR.path
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    path.with_name("kafka.jar.aside").write_bytes(b"left by a killed process")
    assert install(tmp_path, (JAR,), repository.url) == [path]
    assert path.read_bytes() == WHOLE
    assert names(tmp_path) == ["kafka.jar"]


def test_a_damaged_jar_is_not_kept_where_it_cannot_be_fetched_again(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / JAR.path
    path.parent.mkdir(parents=True)
    path.write_bytes(CHANGED)
    repository.bodies = [None]
    with pytest.raises(OSError, match="could not be downloaded"):
        install(tmp_path, (JAR,), repository.url)
    assert names(tmp_path) == []


def test_a_complete_cache_that_cannot_be_written_is_used(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def refused(path: Path) -> Iterator[None]:
        raise OSError(errno.EROFS, "Read-only file system", str(path))
        yield

    monkeypatch.setattr(kafka_install, "pinned_jars", lambda: (JAR,))
    monkeypatch.setattr(kafka_install, "_only_one", refused)  # of root, a folder's mode would be no obstacle
    monkeypatch.setenv("ROLLSTREAM_CACHE", str(tmp_path))
    path = tmp_path / "kafka" / "maven" / JAR.path
    for content in (None, CHANGED):
        if content is not None:
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
        with pytest.raises(BrokerError, match="Read-only file system"):
            jars()
    assert path.read_bytes() == CHANGED, "nothing is changed without the lock"
    path.write_bytes(WHOLE)
    assert jars() == [path]
    assert not repository.asked


def test_the_progress_counts_what_is_being_downloaded(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.jar", is_alone=True) as file:
        file.write(b"x" * 10)
        file.flush()
        assert kafka_install._num_bytes(tmp_path) == 10
    assert kafka_install._num_bytes(tmp_path) == 10


def test_jars_come_from_the_named_repository_and_their_lack_names_the_remedy(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.bodies = [None]
    monkeypatch.setenv("ROLLSTREAM_CACHE", str(tmp_path))
    monkeypatch.setenv(kafka_install.REPOSITORY, repository.url)
    with pytest.raises(BrokerError, match=r"in ROLLSTREAM_MAVEN_REPOSITORY; ROLLSTREAM_CACHE sets"):
        jars()
    assert not list(tmp_path.rglob("*.jar"))
    assert all(asked.startswith("/maven2/") for asked in repository.asked)
