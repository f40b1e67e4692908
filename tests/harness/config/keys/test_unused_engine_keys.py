"""Keys of an engine's block that its other keys leave without effect are named with the reason."""

from typing import Any

import pytest

from rollstream.harness.config.unused_keys import of_engine
from rollstream.schemas.services import ScriptedSettings, TransformersSettings, VllmSettings

CACHES = ("prefix_cache_mb", "kv_cache_mb", "full_copies")
GIVEN: dict[str, Any] = {"max_batch": 8, "prefix_cache_mb": 1, "kv_cache_mb": 64, "full_copies": 2}


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        (TransformersSettings(**GIVEN), ()),
        (TransformersSettings(batching="static", **GIVEN), CACHES),
        (TransformersSettings(batching="static", deterministic=True, **GIVEN), ("batching", "max_batch", *CACHES)),
        (TransformersSettings(deterministic=True), ()),
        (ScriptedSettings(deterministic=True), ("deterministic",)),
        (VllmSettings(dtype="float32"), ()),
        (VllmSettings(dtype="float32", base_urls=("http://127.0.0.1:8000",)), ("dtype",)),
    ],
)
def test_unused_keys_of_an_engine_are_named(engine: Any, names: tuple[str, ...]) -> None:
    found = [*of_engine("here", engine)]
    assert [name for one in found for name in one.names] == [*names]
    assert {one.location for one in found} == ({"here"} if found else set())
    assert all(one.why for one in found)
