"""Atomic replacement of files, and locked updates of small ones, shared by several processes."""

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any, BinaryIO, NamedTuple

from rollstream.eventlog.disk_space import is_outage
from rollstream.schemas.errors import ModelError

TOKENIZER_FILES = ("added_tokens.json", "merges.txt", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
BY_TENSOR = "tensors-"
"""Before a hash of `base_sha256` over tensors. Older records have hashes over files."""
CHUNK_BYTES = 1 << 22
_HALF_WRITTEN = re.compile(r"[0-9a-f]{16}\.aside")
_TEMPORARY = re.compile(r"(\.[0-9a-f]{8})?\.aside$")
MAX_NUMBERS = 256
"""Processes that may have a number in one folder."""


@contextmanager
def beside(path: Path, *, is_synced: bool = True, is_alone: bool = False) -> Iterator[Path]:
    """A name in the same folder for the file or the folder that the block makes; renamed to `path` when it ends well.

    A file is on the disk before it has its name, unless `is_synced` is false; a folder's files are its maker's to sync.
    `is_alone`: no other process makes this one, so what a killed process left of it is known, and removed first.
    Raises OSError, and then leaves nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.aside" if is_alone else f"{path.name}.{secrets.token_hex(4)}.aside")
    if is_alone:
        _remove(temporary)
    with _removed_on_failure(temporary):
        yield temporary
        if is_synced and temporary.is_file():
            sync_file(temporary)
        os.replace(temporary, path)


def obstacle(folder: Path) -> str:
    """The reason why a folder cannot be created or written, as far as that shows without creating it; else empty.

    For one that does not exist, another is made beside it and removed: some file systems let nobody make any.
    """
    path = folder.absolute()
    nearest = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable"
    if nearest == path:
        return ""
    try:
        os.rmdir(mkdtemp(prefix=".rollstream-", dir=nearest))
    except OSError as error:
        return f"no folder can be made in {nearest}: {error.strerror}"
    return ""


def named_beside(name: str) -> str:
    """Undo the temporary name that `beside` gave to what a killed process was making; other names stay."""
    return _TEMPORARY.sub("", name)


@contextmanager
def _removed_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            _remove(temporary)
        raise


@contextmanager
def replacing(
    path: Path, *, is_synced: bool = True, is_private: bool = True, is_alone: bool = False
) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to `path` when the block ends well: a reader finds the old file or the new one.

    Its mode is 0600, or what the process's umask leaves if `is_private` is false. `is_synced=False` skips fsync, for
    files that may be lost in a power failure. Several processes may write the same file at once, and the last one wins,
    unless `is_alone` (see `beside`). Raises OSError, and then leaves no temporary file.
    """
    with (
        beside(path, is_synced=is_synced, is_alone=is_alone) as temporary,
        _created(temporary, is_private=is_private) as file,
    ):
        yield file


def _created(path: Path, *, is_private: bool) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o666), "wb")


class HashingFile:
    """An open file that hashes what is written to it, in order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Hash and write. Raises OSError."""
        self._digest.update(data)
        return self._file.write(data)

    @property
    def sha256(self) -> str:
        """Sha256 of the bytes written so far."""
        return self._digest.hexdigest()


class HashedFile(NamedTuple):
    """A complete file and the hash that its writer computed."""

    path: Path
    sha256: str
    size_bytes: int


def write_hashed(pieces: Iterable[bytes | memoryview], folder: Path, name_of: Callable[[str], str]) -> HashedFile:
    """Write a file whose name depends on its sha256, hashed while it is written.

    It is whole and on the disk before it has its name. Raises OSError, and then leaves nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{secrets.token_hex(8)}.aside"
    with _removed_on_failure(temporary):
        with _created(temporary, is_private=False) as file:
            hashing = HashingFile(file)
            for piece in pieces:
                hashing.write(piece)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        path = folder / name_of(hashing.sha256)
        os.replace(temporary, path)
    return HashedFile(path, hashing.sha256, size_bytes)


def half_written(folder: Path) -> list[Path]:
    """Files of a folder that `write_hashed` is writing, or was when its process was killed."""
    return [path for path in folder.glob("*.aside") if _HALF_WRITTEN.fullmatch(path.name)]


def linked(source: Path, path: Path) -> bool:
    """Give a whole file that is on the disk a second name, replacing the file of that name; False if it cannot be done.

    Not every file system has hard links, and none has them to another disk. Raises OSError if the disk is full.
    """
    try:
        with beside(path, is_synced=False) as temporary:
            os.link(source, temporary)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
            raise
        return False
    return True


def write_whole(
    path: Path, content: str | bytes, *, is_synced: bool = True, is_private: bool = True, is_alone: bool = False
) -> None:
    """Replace a file by one with this content (text as UTF-8). As `replacing`."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, is_synced=is_synced, is_private=is_private, is_alone=is_alone) as file:
        file.write(data)


def sync_file(path: Path) -> None:
    """Wait until what was written to a file is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk. Raises OSError."""
    sync_file(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def give_name(temporary: Path, path: Path) -> None:
    """Rename a folder that was written aside to `path`, whose former content is removed; both are on the disk then.

    The files in it are their makers' to sync. Raises OSError.
    """
    sync_folder(temporary)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    sync_folder(path.parent)


def remove_whole(path: Path) -> None:
    """Remove a file or a folder, of which nobody reads a part: its name is gone first. Raises OSError."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    hidden = path.with_name(f".{path.name}")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def move(path: Path, target: Path) -> None:
    """Give a file another name on its file system. Raises OSError."""
    os.replace(path, target)


def tokenizer_sha256(model: str) -> str:
    """sha256 over the files that make token ids of text in a model's folder; empty for a hub name, or if it has none.

    The chat template is not among them: it may change under weights that are trained already. A file is read again once
    its time or size differs: engines ask for each version, and a vocabulary of 150,000 has 15 MB. Raises ModelError,
    and OSError in an outage of its disk.
    """
    folder = Path(model).expanduser()
    with _readable(model):
        return _sha256_over([folder / name for name in TOKENIZER_FILES if (folder / name).is_file()])


def base_sha256(model: str, like: str = "") -> str:
    """Hash of the weights in a model's folder, under an adapter; empty if it has none. Of a hub name, the folder is its
    newest snapshot in the hub's cache; empty if that lacks some of them.

    Of safetensors it is over the tensors by their names, so that the same weights saved again in other shards are the
    same base model; of other files it is over the files. `like`: a recorded hash, as whose the weights are hashed. A
    file is read again once its time or size differs: that takes a second or two per GB. Raises ModelError, and
    OSError in an outage of its disk.
    """
    with _readable(model):
        return _base_sha256(_folder_of(model), like)


def _folder_of(model: str) -> Path:
    """Folder of a model, which need not exist. Of a hub name, it is in the cache with all weights, or it does not."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache  # with the extra `learner`; takes a moment

        found = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # not installed, or a name that the hub does not allow
        return folder
    return Path(found).parent if isinstance(found, str) and _has_all_shards(Path(found).parent) else folder


def _has_all_shards(snapshot: Path) -> bool:
    """Whether the weight files that a model's index lists are there; without an index there is one file."""
    for kind in ("model*.index.json", "pytorch_model*.index.json"):
        for index in sorted(snapshot.glob(kind)):
            try:
                names = json.loads(index.read_bytes())["weight_map"].values()
            except (ValueError, LookupError, TypeError, AttributeError):  # not an index, as transformers will say
                return False
            return all((snapshot / str(name)).is_file() for name in names)
    return True


@contextmanager
def _readable(model: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_outage(error):
            raise
        raise ModelError(f"the files of model {model} cannot be read: {error}; restore them") from error


def _base_sha256(folder: Path, like: str) -> str:
    found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    files = [path for path in found if path.is_file()]
    if like and not like.startswith(BY_TENSOR):
        return _sha256_over(files)
    tensors: dict[str, str] = {}
    for path in files:
        stat = path.stat()
        of_file = _tensors_of(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if of_file is None:
            return _sha256_over(files)
        tensors |= of_file
    hashes = Counter(tensors.values())
    named = (f"{name}\0{one}\0" for name, one in sorted(tensors.items()) if hashes[one] == 1 or not _is_head(name))
    return BY_TENSOR + hashlib.sha256("".join(named).encode()).hexdigest() if tensors else ""


def _is_head(name: str) -> bool:
    """Whether a tensor is stored or left out where it is tied to the embeddings."""
    return name.split(".")[-2:] == ["lm_head", "weight"]


@functools.lru_cache(maxsize=256)
def _tensors_of(path: Path, inode: int, mtime_ns: int, size_bytes: int) -> dict[str, str] | None:
    """sha256 of type, shape and bytes of each tensor of a safetensors file, by name; None for another file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: Any = json.loads(file.read(length)) if length < size_bytes else None
            entries = {name: one for name, one in header.items() if name != "__metadata__"}
            return {name: _tensor_sha256(file, 8 + length, one) for name, one in entries.items()}
        except (ValueError, AttributeError, LookupError, TypeError):
            return None


def _tensor_sha256(file: BinaryIO, begin: int, entry: dict[str, Any]) -> str:
    digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']}\0".encode())
    first, end = entry["data_offsets"]
    file.seek(begin + first)
    for at in range(first, end, CHUNK_BYTES):
        digest.update(file.read(min(CHUNK_BYTES, end - at)))
    return digest.hexdigest()


def _sha256_over(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        found = path.stat()
        digest.update(f"{path.name}\0{_known_sha256(path, found.st_ino, found.st_mtime_ns, found.st_size)}\0".encode())
    return digest.hexdigest() if files else ""


@functools.lru_cache(maxsize=256)
def _known_sha256(path: Path, inode: int, mtime_ns: int, size_bytes: int) -> str:
    return sha256_of(path)


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Contents of a JSON file; empty if it is missing or invalid. Raises OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def update_json(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Apply `change` to a JSON file's content and write the result if it differs.

    A lock file serializes the updates of several processes. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_json(path)
        changed = change(known)
        if changed != known:
            write_whole(path, json.dumps(changed, indent=1))


def own_number(folder: Path, name: str) -> tuple[int, IO[str]]:
    """The lowest number that no process has in a folder, and the lock that keeps it until it is closed or its process
    ends.

    `name`: of the lock files, with `{}` for the number. Raises BlockingIOError if MAX_NUMBERS processes have one,
    OSError if the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(MAX_NUMBERS):
        lock = (folder / name.format(number)).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return number, lock
    raise BlockingIOError(errno.EWOULDBLOCK, f"in use by {MAX_NUMBERS} processes", str(folder))
