"""Remote filesystems: one that is away for a while and raises an exception that is not an OSError, as cloud clients do,
and one of buckets, as an object store is.
"""

from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class RemoteFileSystem(MemoryFileSystem):
    """`remote://NAME`: files in memory; the next `num_failures` calls raise RuntimeError."""

    store: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    pseudo_dirs: ClassVar[list[str]] = [""]
    protocol = "remote"
    num_failures: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("remote://", "memory://") if isinstance(path, str) else path)

    @classmethod
    def answer(cls) -> None:
        """Raise what the client of an object store raises while it cannot be reached."""
        if cls.num_failures:
            cls.num_failures -= 1
            raise RuntimeError("Could not connect to the endpoint URL")

    def exists(self, path: str, **options: Any) -> bool:
        self.answer()
        return super().exists(path, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.answer()
        return super().info(path, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.answer()
        return super().find(path, *arguments, **options)

    def rm_file(self, path: str) -> None:
        self.answer()
        self._rm(path)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.answer()
        return super().cat_file(path, *arguments, **options)

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.answer()
        return super().open(path, *arguments, **options)


class Buckets(MemoryFileSystem):
    """An object store with the buckets in `names`: `makedirs` creates one, as s3fs's does, and `open` never."""

    store: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    pseudo_dirs: ClassVar[list[str]] = [""]
    protocol = ("memory", "s3")  # pyright: ignore[reportAssignmentType]
    names: ClassVar[set[str]] = set()

    @staticmethod
    def bucket_of(path: str) -> str:
        return str(path).removeprefix("s3://").strip("/").partition("/")[0]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.names.add(self.bucket_of(path))

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.bucket_of(path) not in self.names:
            raise FileNotFoundError("The specified bucket does not exist")
        return super().open(path, *arguments, **options)


fsspec.register_implementation("remote", RemoteFileSystem, clobber=True)
