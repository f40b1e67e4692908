"""The archive of the broker's classes: made of what a first broker loaded, mapped by the Java runtime, never needed."""

import os
import subprocess
from pathlib import Path

import pytest

from rollstream.eventlog.broker import install as kafka_install
from rollstream.eventlog.broker.broker import JVM, EmbeddedBroker
from rollstream.eventlog.broker.class_archive import ClassArchive
from rollstream.schemas.errors import BrokerError

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.fixture
def archive(tmp_path: Path) -> ClassArchive:
    return ClassArchive(tmp_path, kafka_install.java(), str(kafka_install.jars()[0]))


def run_java(archive: ClassArchive, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [str(archive.java), *options, "-cp", archive.classpath, "-version"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_first_process_lists_its_classes_the_second_makes_the_archive_and_java_maps_it(archive, tmp_path):
    listed = tmp_path / "classes.txt"
    first = archive.options(listed)
    assert run_java(archive, *first).returncode == 0
    archive.remember(listed)
    second = archive.options(listed)
    assert second == archive.options(listed) == [f"-XX:SharedArchiveFile={archive.path}"]
    mapped = run_java(archive, *second, "-Xshare:on")  # `on` is an error where the archive does not fit
    assert mapped.returncode == 0, mapped.stderr
    assert "sharing" in mapped.stderr


def test_without_a_list_the_next_process_lists_again(archive, tmp_path):
    listed = tmp_path / "classes.txt"
    archive.remember(listed)
    assert archive.options(listed) == [f"-XX:DumpLoadedClassList={listed}"]


def test_a_class_list_that_makes_no_archive_is_logged_and_discarded(archive, tmp_path, caplog):
    listed = tmp_path / "classes.txt"
    listed.write_text("java/lang/Object id: none\n")
    archive.remember(listed)
    assert archive.options(listed) == [f"-XX:DumpLoadedClassList={listed}"]
    assert "cannot create the archive of Apache Kafka's classes" in caplog.text
    assert archive.options(listed) == [f"-XX:DumpLoadedClassList={listed}"]
    assert len(caplog.records) == 1


def test_an_archive_made_on_a_machine_with_much_memory_fits_a_broker(tmp_path, monkeypatch):
    options = ("-Xmx64m", "-XX:+UseSerialGC")
    archive = ClassArchive(tmp_path, kafka_install.java(), str(kafka_install.jars()[0]), options)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx40g")  # a quarter of the memory, unless an option says otherwise
    listed = tmp_path / "classes.txt"
    run_java(archive, *options, *archive.options(listed))
    archive.remember(listed)
    mapped = run_java(archive, *options, *archive.options(listed), "-Xshare:on")
    assert mapped.returncode == 0, mapped.stdout


def test_where_no_archive_can_be_made_a_broker_starts_without(archive, tmp_path, caplog):
    archive.path.with_suffix(".txt").write_text("java/lang/Object id: 0\n")
    archive.path.with_suffix(".lock").mkdir()
    listed = tmp_path / "classes.txt"
    assert archive.options(listed) == [f"-XX:DumpLoadedClassList={listed}"]
    assert "cannot create the archive of Apache Kafka's classes" in caplog.text


def test_a_damaged_archive_is_thrown_away_and_the_next_start_does_without(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "kafka"
    cache.mkdir(parents=True)
    for name in kafka_install.cache_folder().iterdir():
        if name.name != "lock" and not name.name.startswith("classes"):
            (cache / name.name).symlink_to(name)
    monkeypatch.setenv("ROLLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # Java leaves a report there
    archive = ClassArchive(cache, kafka_install.java(), os.pathsep.join(map(str, kafka_install.jars())), JVM)
    listed = tmp_path / "classes.txt"
    run_java(archive, *JVM, *archive.options(listed))
    archive.remember(listed)
    assert archive.options(listed) == [f"-XX:SharedArchiveFile={archive.path}"]
    whole = archive.path.read_bytes()
    damaged = whole[: len(whole) // 2].ljust(len(whole), b"\0")
    broker = EmbeddedBroker(tmp_path / "workspace")
    for when in ("the storage is formatted", "the broker begins"):
        archive.path.write_bytes(damaged)
        with pytest.raises(BrokerError, match="was removed, start again"):
            broker.start()
        assert not archive.path.exists(), when
        archive.path.with_suffix(".txt").unlink(missing_ok=True)
        broker.start()
        broker.stop()


def test_another_class_path_has_another_archive_and_so_have_jars_that_were_fetched_again(archive, tmp_path):
    assert ClassArchive(archive.folder, archive.java, "other.jar").path != archive.path
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"")
    of_jar = ClassArchive(tmp_path, archive.java, str(jar))
    before = of_jar.path
    os.utime(jar, (0, 0))
    assert of_jar.path != before


def test_archives_that_were_not_used_for_long_are_removed_when_another_is_made(archive, tmp_path):
    old, recent = tmp_path / "classes-old.jsa", tmp_path / "classes-recent.jsa"
    for path in (old, old.with_suffix(".txt"), recent):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    listed = tmp_path / "classes.txt"
    run_java(archive, *archive.options(listed))
    archive.remember(listed)
    assert archive.options(listed) == [f"-XX:SharedArchiveFile={archive.path}"]
    assert sorted(path.name for path in tmp_path.glob("*.jsa")) == sorted([archive.path.name, recent.name])
    assert not old.with_suffix(".txt").exists()
