"""Settings of self-play: who plays beside the newest weights, and which versions are kept for it."""

import re
from typing import Any

from pydantic import Field, field_validator

from rollstream.schemas.base import Settings

FROZEN_VERSION = re.compile(r"((?P<run>[^@/\s]+)(/(?P<group>[^@/\s]+))?@)?(?P<version>[0-9]{1,9})")
"""Form of a version in `league.frozen`."""


class LeagueSettings(Settings):
    """Opponents: in some tasks the newest weights play one seat (agent), and others the seats beside it.

    One task has the same opponents in all its rollouts. The opponents are drawn from the candidates, each as likely as
    the others: the versions of the pool, scripted players and frozen versions.
    """

    pool: int = Field(default=20, ge=0, le=1000)
    """Past versions of the seat's model group in the pool, the newest first; they are kept from collection."""
    every: int = Field(default=5, ge=1)
    """Only versions that are a multiple of it enter the pool."""
    latest_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the tasks in which the newest weights play every seat."""
    scripted: tuple[str, ...] = ()
    """Players that the environment plays by itself, by name."""
    frozen: tuple[str, ...] = ()
    """Versions that always are candidates: `VERSION` of the seat's model group, `RUN@VERSION` or `RUN/GROUP@VERSION`.
    """
    seats: tuple[str, ...] = ()
    """Agents whose seats opponents may take; empty: all, but one in each task."""
    outcome: str = "outcome"
    """The reward whose values by agent decide a match: the higher one wins, equal ones are a draw."""
    max_loaded: int = Field(default=2, ge=1)
    """Opponents' versions that a producer holds in memory beside the newest weights."""

    @field_validator("frozen", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return tuple(str(one) for one in value) if isinstance(value, list | tuple) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    @field_validator("frozen")
    @classmethod
    def _are_versions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not FROZEN_VERSION.fullmatch(one):
                raise ValueError(f"{one!r} does not name a version; write VERSION, RUN@VERSION or RUN/GROUP@VERSION")
        return value


class OpponentVersions(Settings):
    """Versions of a model group that may still be drawn as opponents, and so are kept."""

    every: int = Field(default=1, ge=1)
    """Keep the versions that are a multiple of this number."""
    last: int = Field(default=0, ge=0)
    """Keep this many of the newest versions too."""
    frozen: tuple[str, ...] = ()
    """Further players, of this or other model groups (`GROUP@VERSION`)."""
