"""The recorded log-probabilities that a batch needs, and their offsets in `weights`: a fold that keeps none of them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollstream.schemas.algorithm_settings import teacher_of
from rollstream.schemas.events import BatchPlanned, ReferenceScored
from rollstream.schemas.events.weights import Scorer
from rollstream.schemas.revisions import SCORES_SINCE
from rollstream.schemas.settings import JobSettings

MAX_KEPT = 10_000
"""Entries of before a checkpoint that are kept: a trajectory that is trained in several passes is scored once, unless
so many others came in between.
"""


class Wanted(NamedTuple):
    """Query for the newest event of a trajectory and a scorer, of `version` at most."""

    trajectory_sha256: str
    scorer_sha256: str
    version: int


class ScoreAsked(NamedTuple):
    """A member of a batch, by its index, and the scorer that its loss needs."""

    member: int
    scorer: Scorer

    def wanted(self, planned: BatchPlanned) -> Wanted:
        """Query for the index."""
        return Wanted(planned.members[self.member].digest, self.scorer.sha256, planned.yields_version)


@dataclass(slots=True)
class _Entry:
    version: int
    num_parts: int
    offsets: list[int]


@dataclass(slots=True)
class ScoreIndex:
    """Offsets in `weights` by trajectory and scorer."""

    _entries: dict[tuple[str, str], list[_Entry]] = field(default_factory=dict[tuple[str, str], list[_Entry]])
    """Entries by digests, each list with the oldest version first."""
    _first_version: int = -1
    """Entries of older versions need not survive a restart."""

    def take(self, event: ReferenceScored, offset: int) -> None:
        """Take in one event that is not void; the first record of a part counts."""
        entries = self._entries.setdefault((event.trajectory_sha256, event.scorer.sha256), [])
        entry = next((one for one in entries if one.version == event.version), None)
        if entry is None:
            entry = _Entry(event.version, event.num_parts, [])
            entries.append(entry)
            entries.sort(key=lambda one: one.version)
        if event.part == len(entry.offsets) < entry.num_parts:
            entry.offsets.append(offset)

    def offsets(self, wanted: Wanted) -> tuple[int, ...]:
        """Offsets of all parts, in their order; empty if a part is missing.

        A later step may have scored the trajectory again, hence the limit on the version: a step that is trained again
        finds the same event as the first time.
        """
        entries = self._entries.get((wanted.trajectory_sha256, wanted.scorer_sha256), ())
        whole = [one for one in entries if len(one.offsets) == one.num_parts and one.version <= wanted.version]
        return tuple(whole[-1].offsets) if whole else ()

    def first(self, trajectory_sha256: str, scorer_sha256: str) -> tuple[int, ...]:
        """Offsets of the oldest whole entry of a trajectory and a scorer; empty if there is none."""
        entries = self._entries.get((trajectory_sha256, scorer_sha256), ())
        return next((tuple(one.offsets) for one in entries if len(one.offsets) == one.num_parts), ())

    def forget(self, version: int) -> None:
        """Drop entries of versions before a checkpoint's, but for the newest `MAX_KEPT`."""
        self._first_version = max(self._first_version, version)
        old = [key for key, entries in self._entries.items() if entries[-1].version < version]
        for key in old[: max(0, len(old) - MAX_KEPT)]:
            del self._entries[key]

    def anchors(self) -> Iterator[int]:
        """Offsets that a restart reads again."""
        for entries in self._entries.values():
            for entry in entries:
                if entry.version >= self._first_version:
                    yield from entry.offsets


def scorers_of(settings: JobSettings, base_sha256: str) -> tuple[Scorer, ...]:
    """Those that a job's loss needs. `base_sha256`: hash of the weights of its base version."""
    algorithm = settings.algorithm
    teacher = teacher_of(algorithm)
    common: dict[str, Any] = {"temperature": algorithm.temperature, "over_kept": algorithm.needs.behaviour}
    own: dict[str, Any] = {"weights_sha256": base_sha256}
    if settings.model.reference_dtype != "auto":
        own["dtype"] = settings.model.reference_dtype
    found: list[Scorer] = []
    if algorithm.needs.reference and settings.revision >= SCORES_SINCE:
        found.append(Scorer(role="reference", **own, **common))
    if algorithm.needs.teacher and teacher is not None:
        whose = {"model": teacher.path} if teacher.path else own
        found.append(Scorer(role="teacher", context=teacher.context, **whose, **common))
    return tuple(found)


def digest_of(digests: Sequence[str]) -> str:
    """`Scores.sha256` from the content digests of the events, in the order of the members."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest() if digests else ""
