"""A run's examples, out of the artifact that its start names."""

import orjson

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.processors.task_requests import Dataset
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.events import RunStarted


def load_dataset(artifacts: ArtifactStore, started: RunStarted) -> Dataset:
    """Inputs by example id. Raises ArtifactError if the artifact is gone, was changed, or is no dataset."""
    data = artifacts.read(started.dataset)
    try:
        lines = [orjson.loads(line) for line in data.splitlines() if line.strip()]
        return {line["example_id"]: line["inputs"] for line in lines}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        uri = started.dataset.uri
        raise ArtifactError(f"dataset {uri} is not JSON lines of example_id and inputs: {error}") from error
