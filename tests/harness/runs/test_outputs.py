"""Results in files that a user named: modes, links, devices and paths that cannot be written."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollstream.harness.cli.main import error_line, rollstream
from rollstream.harness.runs.preflight import check_result
from rollstream.harness.services.outputs import write_output
from rollstream.metrics.projection.connection import metrics_file
from rollstream.metrics.projection.database import Database
from rollstream.schemas.errors import ConfigError

WRITE = """
import sys
from pathlib import Path
from rollstream.harness.services.outputs import write_output
write_output(Path(sys.argv[1]), "result\\n")
"""


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("old")
    path.chmod(mode)
    before = path.stat().st_ino
    write_output(path, "new")
    assert (path.read_text(), mode_of(path)) == ("new", mode)
    assert path.stat().st_ino != before, "a crash leaves the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_output(tmp_path / "rows.csv", "new")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "rows.csv") == 0o640


def test_a_file_with_several_names_is_written_in_place(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.csv", tmp_path / "other.csv"
    path.write_text("old")
    other.hardlink_to(path)
    write_output(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "new")


def test_a_read_only_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("old")
    path.chmod(0o444)
    if os.access(path, os.W_OK):  # as root, who may write it
        write_output(path, "new")
        assert (path.read_text(), mode_of(path)) == ("new", 0o444)
    else:
        with pytest.raises(PermissionError):
            write_output(path, "new")
        assert path.read_text() == "old"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_remains_theirs_and_a_group_is_kept(tmp_path: Path) -> None:
    for name, user in (("theirs", 12345), ("own", 0)):
        path = tmp_path / name
        path.write_text("old")
        os.chown(path, user, 12345)
        write_output(path, "new")
        assert (path.read_text(), path.stat().st_uid, path.stat().st_gid) == ("new", user, 12345)


def test_a_file_is_written_through_symbolic_links_also_one_that_does_not_exist_yet(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/rows.csv")
    (tmp_path / "first").symlink_to(tmp_path / "link")
    for content in ("new", "newer"):
        write_output(tmp_path / "first", content)
        assert (tmp_path / "folder" / "rows.csv").read_text() == content
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("named", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_standard_output_is_written_where_it_stands(tmp_path: Path, named: str) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    command = [sys.executable, "-c", WRITE, str(tmp_path / named)]
    with tempfile.TemporaryFile(dir=tmp_path) as unnamed:
        subprocess.run(command, stdout=unnamed, check=True)
        unnamed.seek(0)
        assert unnamed.read() == b"result\n"
    log = tmp_path / "log"
    for opened in ("w", "a"):
        with log.open(opened) as file:
            file.write("before\n")
            file.flush()
            subprocess.run(command, stdout=file, check=True)
            file.write("after\n")
    assert log.read_text() == "before\nresult\nafter\n" * 2
    assert sorted(tmp_path.iterdir()) == [tmp_path / "link", log]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"result\n"


def test_a_device_and_a_pipe_are_written_in_place(tmp_path: Path) -> None:
    write_output(Path("/dev/null"), "new")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path / "pipe")]) as writer:
        assert (tmp_path / "pipe").read_text() == "result\n"
    assert writer.returncode == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/rows.csv", "No such file or directory"),
        ("loop", "Too many levels of symbolic links"),
        ("loop/rows.csv", "Too many levels of symbolic links"),
        ("folder", "Is a directory"),
        ("dangling", "No such file or directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to("other")
    (tmp_path / "other").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("missing/rows.csv")
    Database(metrics_file(tmp_path)).close()
    path = tmp_path / name
    error = (
        CliRunner()
        .invoke(rollstream, ["sql", "SELECT 1", "--no-wait", "-w", str(tmp_path), "--output", str(path)])
        .exception
    )
    assert error is not None
    assert error_line(error) == f"{path}: {reason}; correct the path or its permissions"
    with pytest.raises(ConfigError, match="is not writable; give another path"):
        check_result(path)
    assert not (tmp_path / "missing").exists()


def test_a_result_may_go_to_a_new_file_or_to_a_device(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("rows.json")
    for path in (None, tmp_path / "rows.json", tmp_path / "dangling", Path("/dev/null")):
        check_result(path)
