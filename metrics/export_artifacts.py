"""The artifacts of an export: found by their hash below its folder, whatever name the run's events have for them."""

from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.metrics.export_manifest import Manifest
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.settings import ArtifactRef


class ExportArtifacts(ArtifactStore):
    """The artifacts that an export holds, found by their hash; others at the place that their name says."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(str(folder / "artifacts"))
        self._folder = folder
        self._files = {a.sha256: folder / a.file for a in manifest.artifacts if a.file is not None}

    def put_file(self, path: Path) -> ArtifactRef:
        """Raises ArtifactError."""
        raise self._read_only()

    def put_bytes(self, data: bytes, suffix: str = "") -> ArtifactRef:
        """Raises ArtifactError."""
        raise self._read_only()

    def fetch(self, ref: ArtifactRef) -> Path:
        """A local file with the artifact's verified bytes. Raises ArtifactError if it is nowhere, or differs."""
        try:
            return super().fetch(self._here(ref))
        except ArtifactError as error:
            raise self._missing(ref, error) from error.__cause__

    def read(self, ref: ArtifactRef) -> bytes:
        """The artifact's verified bytes. Raises ArtifactError if it is nowhere, or differs."""
        try:
            return super().read(self._here(ref))
        except ArtifactError as error:
            raise self._missing(ref, error) from error.__cause__

    def _here(self, ref: ArtifactRef) -> ArtifactRef:
        path = self._files.get(ref.sha256)
        return ref if path is None else ref.model_copy(update={"uri": str(path.absolute())})

    def _missing(self, ref: ArtifactRef, error: ArtifactError) -> ArtifactError:
        if ref.sha256 in self._files:
            return error
        return ArtifactError(
            f"{error}; the export {self._folder} does not hold it (with --weights it holds all weights)"
        )

    def _read_only(self) -> ArtifactError:
        return ArtifactError(f"an export is read-only: nothing can be stored in {self._folder}")
