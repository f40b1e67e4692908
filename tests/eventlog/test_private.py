"""Private folders and files: closed to other users when they are made, or as soon as they are used again."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.eventlog.files import write_whole
from rollstream.eventlog.private import make_private, read_private
from rollstream.schemas.errors import ConfigError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def can_read(path: Path, *, user: int = NOBODY) -> bool:
    command = ["ls" if path.is_dir() else "cat", str(path)]
    return subprocess.run(command, user=user, group=user, extra_groups=[], capture_output=True).returncode == 0


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that every user can enter, as home folders and data disks often are (pytest's own are closed)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_new_folder_is_private_and_what_lies_above_it_is_not(open_place: Path) -> None:
    make_private(open_place / "runs" / ".rollstream")
    assert mode(open_place / "runs" / ".rollstream") == 0o700
    assert mode(open_place / "runs") == 0o777 & ~os.umask(os.umask(0o022))


def test_a_folder_with_wider_permissions_is_closed_with_what_is_in_it(
    open_place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = open_place / "elsewhere.txt"
    elsewhere.write_text("somebody else's")
    elsewhere.chmod(0o644)
    workspace = open_place / ".rollstream"
    (workspace / "logs").mkdir(parents=True)
    (workspace / "sql.token").write_text("secret")
    (workspace / "model").symlink_to(elsewhere)
    for path, wide in ((workspace, 0o755), (workspace / "logs", 0o775), (workspace / "sql.token", 0o644)):
        path.chmod(wide)
    for _ in range(2):
        make_private(workspace)
    assert (mode(workspace), mode(workspace / "logs"), mode(workspace / "sql.token")) == (0o700, 0o700, 0o600)
    assert mode(elsewhere) == 0o644
    assert [record.message for record in caplog.records] == [
        f"workspace {workspace} was accessible to other users (mode 0755); its mode is now 0700"
    ]


def test_a_folder_that_is_everybodys_is_refused_and_left_as_it_is(
    open_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, home = open_place / "tmp", open_place / "home"
    shared.mkdir()
    home.mkdir()
    shared.chmod(0o1777)
    home.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    for folder in (shared, home, Path("/")):
        before = mode(folder)
        with pytest.raises(ConfigError, match="give a separate folder"):
            make_private(folder)
        assert mode(folder) == before


@as_root
def test_a_folder_that_cannot_be_closed_is_one_clear_error(open_place: Path) -> None:
    workspace = open_place / ".rollstream"
    workspace.mkdir()
    workspace.chmod(0o755)  # root's, so nobody cannot change it
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            make_private(workspace)
        except ConfigError as error:
            os._exit(7 if "mode 0755" in str(error) and f"chmod 700 {workspace}" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_private_file_is_private_from_its_first_moment_and_when_it_is_read_again(open_place: Path) -> None:
    path = open_place / "password"
    assert read_private(path) is None
    write_whole(path, "first")
    assert (mode(path), read_private(path)) == (0o600, "first")
    path.chmod(0o644)
    assert (read_private(path), mode(path)) == ("first", 0o600)
    write_whole(path, "second")
    assert (read_private(path), mode(path), os.listdir(open_place)) == ("second", 0o600, ["password"])


@as_root
def test_another_user_reads_neither_a_private_folder_nor_a_private_file(open_place: Path) -> None:
    workspace, file = open_place / ".rollstream", open_place / "password"
    make_private(workspace)
    (workspace / "log").write_text("a log")
    (workspace / "log").chmod(0o644)
    write_whole(file, "secret")
    assert can_read(open_place)
    assert not can_read(workspace)
    assert not can_read(workspace / "log")
    assert not can_read(file)
