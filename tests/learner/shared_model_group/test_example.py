"""The example in `examples/shared_model_group.py` runs as it stands."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "shared_model_group.py"


@pytest.mark.slow
def test_the_example_fine_tunes_a_shared_model_three_times(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("shared_model_group_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert asyncio.run(example.main(tmp_path)) == [f"example/players@{version}" for version in (1, 2, 3)]
