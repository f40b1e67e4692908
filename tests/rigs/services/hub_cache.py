"""A hub cache on disk, as huggingface_hub leaves it after a download."""

import hashlib
from pathlib import Path


def move_to_cache(model: Path, name: str, cache: Path) -> Path:
    """Make a folder the newest snapshot of a hub name in a cache (`HF_HUB_CACHE`); returns the snapshot's folder."""
    revision = hashlib.sha1(name.encode()).hexdigest()
    kept = cache / f"models--{name.replace('/', '--')}"
    snapshot = kept / "snapshots" / revision
    for folder in (kept / "refs", kept / "blobs", snapshot):
        folder.mkdir(parents=True)
    (kept / "refs" / "main").write_text(revision)
    for file in sorted(model.iterdir()):
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(kept / "blobs" / blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    model.rmdir()
    return snapshot
