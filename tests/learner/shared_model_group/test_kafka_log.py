"""The group on a Kafka log, as docs/shared-models.md shows it."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.learner.shared_model_group import FineTuneOptions, GroupAgent, SharedAgentParams
from rollstream.schemas import ids
from rollstream.schemas.kafka import KafkaSettings

PAGE = Path(__file__).parents[3] / "docs" / "shared-models.md"


@pytest.mark.kafka
def test_the_documented_code_opens_a_group_on_kafka_twice(
    kafka: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(kafka).items():
        monkeypatch.setenv(name, value)
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "KafkaLog(" in block]
    run_id = ids.new_run_id("documented")
    names: dict[str, Any] = {}
    exec(compile(code.replace("run-1", run_id), str(PAGE), "exec"), names)
    params = SharedAgentParams(model_name="models/tiny", use_lora=False)

    async def scenario() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
        for _ in range(2):
            await names["fine_tune"]([GroupAgent("prover", params, "players")], str(tmp_path / "artifacts"))

    asyncio.run(scenario())
    assert capsys.readouterr().out == "models/tiny []\n" * 2


def test_every_option_is_documented() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("### Options") : text.index("### Jobs")]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in row] == list(FineTuneOptions.model_fields)
