"""Immutable artifacts by sha256 under one fsspec URI: weights, datasets, raw bytes of dead letters.

An artifact's file is named by its hash, written to a temporary file and renamed, and verified before use. Its URI is
relative to the store and only its last part is used, so that a store can be moved or copied and no record can name a
file outside of it. Artifacts of a remote store are copied into a local cache, one for each process: a process that is
killed leaves its copies to the next one, which removes them.
"""

import errno
import hashlib
import io
import os
import re
import secrets
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from rollstream.eventlog.files import HashedFile, linked, replacing, sha256_of, sync_folder
from rollstream.eventlog.private import own_cache
from rollstream.schemas.errors import ArtifactError, ConfigError, StoreUnavailableError
from rollstream.schemas.settings import ArtifactRef
from rollstream.schemas.variables import conceal, expand

CHUNK_BYTES = 1 << 20
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos", "tosfs"})
"""fsspec's protocols of stores with buckets (at Azure, containers)."""
_SUFFIX = re.compile(r"(\.[A-Za-z0-9_-]{1,32}){0,2}")
_FILE = re.compile(rf"(?P<sha256>[0-9a-f]{{64}}){_SUFFIX.pattern}")


class ArtifactStore:
    """Artifacts under `uri`: a folder, `file://...`, or any URI that fsspec knows.

    Every method raises StoreUnavailableError, an ArtifactError, if the store is unreachable or not writable: the same
    call may succeed later. Any other ArtifactError is permanent.
    """

    def __init__(self, uri: str, *, cache: Path | None = None, env: Mapping[str, str] = os.environ) -> None:
        """`uri`: as written; its `${NAME}` are expanded only here and stay unexpanded in references and messages.

        `cache`: folder of local copies of remote artifacts; default: this process's own below a folder of the user's
        temporary files. Raises ConfigError for a variable that is not set, ArtifactError for a URI that fsspec does not
        know, or whose package is not installed.
        """
        self.uri = uri.rstrip("/")
        self._env = env
        self._filesystem: Any
        try:
            expanded = str(expand(self.uri, env, "artifact_uri"))
            self._filesystem, self._root = fsspec.core.url_to_fs(expanded)
        except (ValueError, ImportError) as error:
            if isinstance(error, ConfigError):
                raise
            package = getattr(error.__cause__, "name", None)  # of the module that fsspec could not import
            remedy = f"install {package} where this process runs" if package else "give a URI that fsspec knows"
            raise ArtifactError(f"artifact store {uri}: {self._concealed(error)}; {remedy}, or use a folder") from error
        self._is_local = "file" in _protocols(self._filesystem)
        self._errors: type[Exception] = OSError if self._is_local else Exception
        """Exceptions of the filesystem in an outage: clients of object stores have classes of their own."""
        self.is_of_process = "::memory://" in f"::{expanded}"  # also of `dir::memory://`
        """Whether its artifacts are in the memory of this process alone."""
        self._was_there = False
        """Whether this process has found or stored an artifact in a local store."""
        self._given_cache = cache
        self._num_uses: Counter[str] = Counter()
        """Calls of `fetch` whose copies are not dropped, by sha256: of remote artifacts."""
        self._uses_lock = threading.Lock()

    def put_file(self, path: Path) -> ArtifactRef:
        """Store a file's bytes. Raises ArtifactError if it cannot be read or the store cannot be written."""
        try:
            with path.open("rb") as source:
                sha256 = hashlib.file_digest(source, "sha256").hexdigest()
                size_bytes = source.seek(0, os.SEEK_END)
                source.seek(0)
                return self._put(source, sha256, size_bytes, path.suffix)
        except OSError as error:
            raise ArtifactError(
                f"file {path} cannot be stored as an artifact: {error}; correct its path or permissions"
            ) from error

    def put_bytes(self, data: bytes, suffix: str = "") -> ArtifactRef:
        """Store bytes; existing ones are not written again. Raises ArtifactError."""
        return self._put(io.BytesIO(data), hashlib.sha256(data).hexdigest(), len(data), suffix)

    def put_hashed(self, file: HashedFile, suffix: str = "") -> ArtifactRef:
        """Store a file that nobody changes any more: a second name of it, where the store is on the same file system.

        Raises ArtifactError if it cannot be read or the store cannot be written.
        """
        try:
            with file.path.open("rb") as source:
                return self._put(source, file.sha256, file.size_bytes, suffix, link_to=file.path)
        except OSError as error:
            raise ArtifactError(
                f"file {file.path} cannot be stored as an artifact: {error}; check the file's "
                "permissions and the free space of the store"
            ) from error

    def fetch(self, ref: ArtifactRef) -> Path:
        """A local file with the artifact's verified bytes. Raises ArtifactError if it is missing or differs."""
        name = self._locate(ref)
        if self._is_local:
            _verify(ref, self._hash_file(ref, Path(name)))
            return Path(name)
        with self._uses_lock:
            self._num_uses[ref.sha256] += 1
        try:
            return self._copied(ref, name)
        except BaseException:
            self.drop_copy(ref)
            raise

    def drop_copy(self, ref: ArtifactRef) -> None:
        """Give back what one `fetch` returned: the local copy of a remote artifact goes with its last use."""
        if self._is_local:
            return
        with self._uses_lock:
            self._num_uses[ref.sha256] -= 1
            if self._num_uses[ref.sha256] <= 0:
                del self._num_uses[ref.sha256]
                self._copy_of(ref, self._locate(ref)).unlink(missing_ok=True)

    def read(self, ref: ArtifactRef, *, max_bytes: int | None = None) -> bytes:
        """The artifact's verified bytes. Raises ArtifactError if it is missing, differs or is larger than allowed."""
        name = self._locate(ref)
        with self._failing_as(lambda error: self._unreadable(ref, error)):
            size_bytes = self._filesystem.size(name)
            if max_bytes is not None and size_bytes > max_bytes:
                raise ArtifactError(
                    f"artifact {ref.uri} has {size_bytes:,} bytes, more than the limit of {max_bytes:,}; "
                    "split its content"
                )
            data: bytes = self._filesystem.cat_file(name)
        _verify(ref, hashlib.sha256(data).hexdigest())
        return data

    def check(self, ref: ArtifactRef) -> None:
        """Read an artifact in chunks and keep none of them. Raises ArtifactError if it is missing or differs."""
        name = self._locate(ref)
        if self._is_local:
            return _verify(ref, self._hash_file(ref, Path(name)))
        with self._failing_as(lambda error: self._unreadable(ref, error)), self._filesystem.open(name, "rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
        _verify(ref, found)

    @property
    def folder(self) -> Path | None:
        """The local folder of the store; None if it is remote."""
        return Path(self._root) if self._is_local else None

    def listing(self) -> dict[str, int]:
        """Size in bytes of every file by name; empty for a new store. Raises ArtifactError."""
        found: dict[str, dict[str, Any]] = {}
        with (
            self._failing_as(
                lambda error: StoreUnavailableError(
                    f"artifact store {self.uri} cannot be listed: {self._concealed(error)}; make it readable, "
                    "or correct artifact_uri"
                )
            ),
            suppress(FileNotFoundError),
        ):
            found = self._filesystem.find(self._root, detail=True)
        return {name: int(info.get("size") or 0) for name, info in found.items()}

    def name_of(self, ref: ArtifactRef) -> str | None:
        """Name of an artifact's file if its URI is in this store, else None."""
        try:
            name = self._locate(ref)
            filesystem, named = fsspec.core.url_to_fs(ref.uri)
        except (ArtifactError, ValueError, ImportError):
            return None
        is_absolute = _protocols(filesystem) == _protocols(self._filesystem) and named == name
        return name if is_absolute or f"{self._root}/{ref.uri}" == name else None

    def remove(self, ref: ArtifactRef) -> None:
        """Remove an artifact's file, if it exists.

        Raises ArtifactError if it is outside of this store or cannot be removed.
        """
        name = self.name_of(ref)
        if name is None:
            raise ArtifactError(
                f"artifact {ref.uri} is outside of store {self.uri} and was not removed; set artifact_uri to its store"
            )
        with (
            self._failing_as(
                lambda error: StoreUnavailableError(
                    f"artifact {ref.uri} cannot be removed: {self._concealed(error)}; make the store writable"
                )
            ),
            suppress(FileNotFoundError),
        ):
            self._filesystem.rm_file(name)

    def _copied(self, ref: ArtifactRef, name: str) -> Path:
        local = self._copy_of(ref, name)
        if not local.exists() or self._hash_file(ref, local) != ref.sha256:
            with (
                self._failing_as(lambda error: self._unreadable(ref, error)),
                self._filesystem.open(name, "rb") as source,
            ):
                found = _write_whole(local, source, ref.sha256)
            _verify(ref, found)
        return local

    def _copy_of(self, ref: ArtifactRef, name: str) -> Path:
        cache = self._given_cache
        if cache is None:
            cache = own_cache(Path(tempfile.gettempdir()))
        return cache / ref.sha256[:2] / (ref.sha256 + Path(name).suffix)

    def _concealed(self, error: Exception) -> str:
        return conceal(str(error) or type(error).__name__, self.uri, self._env)

    @contextmanager
    def _failing_as(self, error_of: Callable[[Exception], ArtifactError]) -> Iterator[None]:
        """Convert errors of the filesystem to `error_of`, with the original as its cause."""
        try:
            yield
        except ArtifactError:
            raise
        except self._errors as error:
            raise error_of(error) from error

    def _locate(self, ref: ArtifactRef) -> str:
        """Path of an artifact: only the file name of its URI is used, which must be derived from its hash.

        Raises ArtifactError otherwise.
        """
        file = ref.uri.rsplit("/", 1)[-1]
        named = _FILE.fullmatch(file)
        if named is None or named["sha256"] != ref.sha256:
            raise ArtifactError(
                f"artifact {ref.uri} is not named by its sha256 {ref.sha256}: it was changed; restore it from a copy"
            )
        return f"{self._root}/{ref.sha256[:2]}/{file}"

    def _put(
        self, source: BinaryIO, sha256: str, size_bytes: int, suffix: str, link_to: Path | None = None
    ) -> ArtifactRef:
        kept = suffix if _SUFFIX.fullmatch(suffix) else ""
        ref = ArtifactRef(uri=f"{sha256[:2]}/{sha256}{kept}", sha256=sha256, size_bytes=size_bytes)
        name = self._locate(ref)
        with self._failing_as(
            lambda error: StoreUnavailableError(
                f"artifact store {self.uri} cannot be written: {self._concealed(error)}; "
                "make it writable or set another artifact_uri"
            )
        ):
            if not self._has(ref, name):
                self._check_mounted()
                if link_to is None or not self._is_local or not linked(link_to, Path(name)):
                    _verify(ref, self._write(name, source, sha256))
            if self._is_local:  # also if another process has just given the name: the log will refer to it
                _sync_names(Path(name).parent, Path(self._root))
        self._was_there = True
        return ref

    def _check_mounted(self) -> None:
        """Raises StoreUnavailableError for a folder in which there were artifacts, and now there is nothing: what is
        written below a mount point is hidden once it is mounted. A new store is empty too.
        """
        if self._is_local and self._was_there and _is_bare(Path(self._root)):
            raise StoreUnavailableError(
                f"artifact store {self.uri} is empty, and had artifacts before; mount it again, or restart to begin a "
                "new one"
            )

    def _unreadable(self, ref: ArtifactRef, error: Exception) -> ArtifactError:
        """The error for an artifact that cannot be read: it is missing, or its store is or was unreachable."""
        is_away = self._is_local and (  # the whole store, like a folder that is not mounted
            _is_bare(Path(self._root)) or Path(self._locate(ref)).exists()
        )
        what = f"artifact {ref.uri} of store {self.uri} cannot be read: {self._concealed(error)}"
        if self._is_of_one_file(error):
            return ArtifactError(f"{what}; make that file readable, or restore it from a copy")
        if isinstance(error, FileNotFoundError) and not is_away:
            return ArtifactError(f"{what}; check that artifact_uri is the store that it was written to")
        return StoreUnavailableError(f"{what}; make its store available, or correct artifact_uri")

    def _is_of_one_file(self, error: Exception) -> bool:
        """Whether an error concerns one artifact only, because the store itself responds: a retry would not help.

        Remote filesystems use EIO for outages too, so this cannot be decided there.
        """
        is_own = isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError)
        is_spoilt = self._is_local and isinstance(error, OSError) and error.errno == errno.EIO
        if not (is_own or is_spoilt):
            return False
        try:
            self._filesystem.ls(self._root, detail=False)
        except self._errors:
            return False
        return True

    def _hash_file(self, ref: ArtifactRef, path: Path) -> str:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # reading a device or a pipe may never end
                raise ArtifactError(f"artifact {ref.uri} is not a regular file; restore it from a copy")
            found = sha256_of(path)
        except OSError as error:
            raise self._unreadable(ref, error) from error
        self._was_there = True
        return found

    def _has(self, ref: ArtifactRef, name: str) -> bool:
        if not self._filesystem.exists(name) or self._filesystem.size(name) != ref.size_bytes:
            return False
        return not self._is_local or self._hash_file(ref, Path(name)) == ref.sha256

    def _write(self, name: str, source: BinaryIO, sha256: str) -> str:
        if self._is_local:
            return _write_whole(Path(name), source, sha256)
        is_in_bucket = not _OBJECT_STORES.isdisjoint(_protocols(self._filesystem))
        if not is_in_bucket:  # there are no folders in it, and a bucket of a misspelt name would be created
            self._filesystem.makedirs(name.rsplit("/", 1)[0], exist_ok=True)
        temporary = f"{name}.{secrets.token_hex(4)}.aside"
        try:
            with self._filesystem.open(temporary, "wb") as target:
                found = _copy(source, target)
            if found == sha256:
                self._filesystem.mv(temporary, name)
                return found
            self._filesystem.rm_file(temporary)
        except BaseException as error:
            with suppress(self._errors):
                self._filesystem.rm_file(temporary)
            if is_in_bucket and isinstance(error, FileNotFoundError):
                raise ArtifactError(
                    f"the bucket of artifact store {self.uri} does not exist ({self._concealed(error)}); create it, or "
                    "correct artifact_uri"
                ) from error
            raise
        return found


def _sync_names(*folders: Path) -> None:
    """Have the folders' names of files on the disk, where the file system and its permissions allow it."""
    for folder in folders:
        try:
            sync_folder(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
                raise


def _is_bare(folder: Path) -> bool:
    """Whether a store is missing or its mount point empty: folders of artifacts stay when their files are removed."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _copy(source: BinaryIO, target: BinaryIO) -> str:
    """Copy all bytes and return their sha256."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


class _OtherBytes(Exception):
    """The copy has another sha256."""


def _write_whole(path: Path, source: BinaryIO, sha256: str) -> str:
    """Rename the file only if its sha256 is as expected; return the sha256."""
    found = ""
    with suppress(_OtherBytes), replacing(path, is_private=False) as target:
        found = _copy(source, target)
        if found != sha256:
            raise _OtherBytes
    return found


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _verify(ref: ArtifactRef, found: str) -> None:
    if found != ref.sha256:
        raise ArtifactError(
            f"artifact {ref.uri} has the wrong hash: {found}, not {ref.sha256}; it was changed, restore it from a copy"
        )
