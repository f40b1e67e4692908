"""The archive of the broker's classes: made of what a first broker loaded, mapped by the Java runtime, never needed."""

import subprocess
from pathlib import Path

import pytest

from rollstream.eventlog import kafka_install
from rollstream.eventlog.class_archive import ClassArchive

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


def test_a_list_that_makes_no_archive_is_said_and_thrown_away(archive, tmp_path, caplog):
    listed = tmp_path / "classes.txt"
    listed.write_text("java/lang/Object id: none\n")
    archive.remember(listed)
    assert archive.options(listed) == [f"-XX:DumpLoadedClassList={listed}"]
    assert "no archive of Apache Kafka's classes" in caplog.text
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


def test_another_class_path_has_another_archive(archive):
    assert ClassArchive(archive.folder, archive.java, "other.jar").path != archive.path
