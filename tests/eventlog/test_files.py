"""Small files that several processes write at once."""

import hashlib
import json
import multiprocessing
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.files import (
    beside,
    give_name,
    read_json,
    remove_whole,
    replacing,
    update_json,
    write_hashed,
    write_whole,
)

NUM_PROCESSES, NUM_CHANGES = 4, 100


def change_often(path: Path, name: str) -> None:
    for number in range(NUM_CHANGES):

        def change(known: dict[str, Any], number: int = number) -> dict[str, Any]:
            return {**known, name: [*known.get(name, []), number]}

        update_json(path, change)


def test_changes_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "known.json"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=change_often, args=(path, f"p{n}")) for n in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
    assert read_json(path) == {f"p{n}": list(range(NUM_CHANGES)) for n in range(NUM_PROCESSES)}
    assert sorted(one.name for one in path.parent.iterdir()) == [".known.json.lock", "known.json"]


def test_a_failed_write_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    write_whole(path, "{}")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert [one.name for one in tmp_path.iterdir()] == ["known.json"]
    assert path.read_text() == "{}"


@pytest.mark.parametrize("content", ["", "{", "[1]", "3"])
def test_a_damaged_file_holds_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "known.json"
    path.write_text(content)
    assert read_json(path) == {}
    update_json(path, lambda known: {**known, "a": 1})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_reader_finds_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "made" / "data"
    write_whole(path, b"old")
    with replacing(path, is_private=False) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", "not bytes"])  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert [(one.name, one.read_bytes()) for one in path.parent.iterdir()] == [("data", b"new")]


def test_a_file_is_private_unless_it_is_to_be_shared(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        write_whole(tmp_path / "own", "x")
        write_whole(tmp_path / "shared", "x", is_private=False)
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"own": 0o600, "shared": 0o644}


def test_a_folder_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    with beside(folder) as temporary:
        temporary.mkdir()
        (temporary / "data").write_bytes(b"1")
        assert not folder.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["export", "data"]
    with pytest.raises(FileExistsError), beside(tmp_path / "other") as temporary:
        shutil.copytree(shutil.copytree(folder, temporary), temporary)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_the_sole_writer_of_a_file_removes_the_rest_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.with_name("archive.aside").write_bytes(b"half")
    write_whole(path, b"whole", is_alone=True)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("archive", b"whole")]


def test_a_folder_takes_the_name_of_what_was_there(tmp_path: Path) -> None:
    for name in ("temporary", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    give_name(tmp_path / "temporary", tmp_path / "whole")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["whole", "whole/temporary"]
    remove_whole(tmp_path / "whole")
    remove_whole(tmp_path / "whole")
    assert list(tmp_path.iterdir()) == []


def test_a_file_named_by_its_hash_is_hashed_while_it_is_written(tmp_path: Path) -> None:
    parts = [b"one", memoryview(b"two")]
    path, sha256, size_bytes = write_hashed(parts, tmp_path / "new", lambda sha256: f"v1.{sha256}")
    assert sha256 == hashlib.sha256(b"onetwo").hexdigest()
    assert path == tmp_path / "new" / f"v1.{sha256}"
    assert size_bytes == len(b"onetwo")
    assert path.read_bytes() == b"onetwo"

    def broken() -> Iterator[bytes]:
        yield b"one"
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_hashed(broken(), tmp_path / "new", lambda sha256: sha256)
    assert list((tmp_path / "new").iterdir()) == [path]
