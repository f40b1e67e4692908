"""NAT's steps as chat messages, beside what NAT's own function makes of the same steps."""

import json
from typing import Any

import pytest
from nat.data_models.intermediate_step import IntermediateStep
from nat.finetuning.utils.parsers.base_parser import parse_to_openai_messages as nats

from rollstream.harness import parse_to_openai_messages
from tests.rigs import nat_samples as samples

ASK = samples.messages("1+1=")
LOOP = [*samples.messages("1+1=", "add"), {"role": "tool", "content": "2"}]
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = samples.tool("t", "2", framework="langchain")
CASES: dict[str, list[Any]] = {
    "one call": samples.langchain("a", ASK, "2"),
    "without log-probabilities": samples.langchain("a", ASK, "2", reported={}),
    "a tool's loop": [*samples.langchain("a", ASK, "add"), *TOOL, *samples.langchain("b", LOOP, "2")],
    "a growing history": [
        *samples.langchain("a", [SYSTEM, *ASK], "2"),
        *samples.langchain("b", [SYSTEM, *samples.messages("1+1=", "2", "again")], "3"),
    ],
    "a tool speaks first": samples.langchain("a", [{"role": "tool", "content": "hi"}, *ASK], "2"),
    "a tool alone": TOOL,
    "no framework": samples.openai("a", ASK, "2"),
    "nothing": [],
    "a whole workflow": samples.workflow(samples.langchain("a", ASK, "2")),
    "a prompt that is sampled twice": [*samples.langchain("a", ASK, "2"), *samples.langchain("b", ASK, "3")],
    "a text that is said twice": [
        *samples.langchain("a", ASK, "2"),
        *samples.langchain("b", [*samples.messages("1+1=", "2"), *ASK], "3"),
    ],
    "a system message late": [
        *samples.langchain("a", ASK, "2"),
        *samples.langchain("b", [*samples.messages("1+1=", "2"), SYSTEM, *samples.messages("go")], "3"),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_messages_and_refusals_are_those_of_nat(case: str) -> None:
    steps = [IntermediateStep.model_validate(step) for step in CASES[case]]
    try:
        expected = nats(steps)
    except ValueError:
        for given in (steps, CASES[case]):
            with pytest.raises(ValueError, match="message"):
                parse_to_openai_messages(given)
        return
    for given in (steps, CASES[case]):
        assert json.loads(json.dumps(parse_to_openai_messages(given))) == json.loads(json.dumps(expected))
