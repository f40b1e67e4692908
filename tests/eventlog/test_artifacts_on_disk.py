"""A local store on its disk: mounted or not, and names that are on the disk before the log refers to them."""

import errno
import os
from pathlib import Path

import pytest

from rollstream.eventlog import artifacts
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import write_hashed
from rollstream.schemas.errors import ArtifactError, StoreUnavailableError
from rollstream.schemas.settings import ArtifactRef

DATA = b"weights" * 1000


@pytest.mark.parametrize("state", ["missing", "empty", "with_files"])
def test_a_store_that_is_not_mounted_is_away_and_its_artifacts_are_not_gone(state: str, tmp_path: Path) -> None:
    root = tmp_path / "mount"
    gone = ArtifactRef(uri=f"aa/{'a' * 64}", sha256="a" * 64, size_bytes=1)
    if state != "missing":
        root.mkdir()
    if state == "with_files":
        ArtifactStore(str(root)).put_bytes(DATA)
    store = ArtifactStore(str(root))
    for use in (store.fetch, store.read, store.check):
        with pytest.raises(ArtifactError) as found:
            use(gone)
        assert isinstance(found.value, StoreUnavailableError) == (state != "with_files")


def test_a_store_of_which_every_artifact_was_removed_is_not_away(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    ref = store.put_bytes(DATA)
    store.remove(ref)
    with pytest.raises(ArtifactError) as found:
        store.read(ref)
    assert not isinstance(found.value, StoreUnavailableError)
    assert store.put_bytes(DATA) == ref


def test_nothing_is_written_below_a_mount_point_whose_store_was_there(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    root.mkdir()
    writer, reader = ArtifactStore(str(root)), ArtifactStore(str(root))
    ref = writer.put_bytes(DATA)
    reader.fetch(ref)
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    for store in (writer, reader):
        with pytest.raises(StoreUnavailableError, match="is empty, and had artifacts before; mount it again"):
            store.put_bytes(b"other")
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    assert writer.put_bytes(b"other") == reader.put_bytes(b"other")


def test_an_artifacts_name_is_on_the_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), any(store_folder.rglob("*.bin"))))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    for number, put in enumerate(("put_bytes", "put_hashed", "put_again")):
        store_folder = tmp_path / put
        store = ArtifactStore(str(store_folder))
        if put == "put_hashed":
            ref = store.put_hashed(write_hashed([DATA], tmp_path / f"{number}", lambda sha256: sha256), ".bin")
        else:
            ref = store.put_bytes(DATA, ".bin")
        if put == "put_again":
            synced.clear()
            store.put_bytes(DATA, ".bin")
        folder = store_folder / ref.uri.partition("/")[0]
        assert synced[-2:] == [(str(folder), True), (str(store_folder), True)]


def test_a_file_system_that_syncs_no_folders_has_a_store_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(artifacts, "sync_folder", refused)
    store = ArtifactStore(str(tmp_path / "store"))
    code = errno.EINVAL
    assert store.read(store.put_bytes(DATA)) == DATA
    code = errno.EIO
    with pytest.raises(StoreUnavailableError, match="cannot be written"):
        store.put_bytes(DATA)
