"""Traces as lines of a file, and the run that is made of them."""

import json

from tests.rigs import nat_samples as nat


def run_of(uuid, question="1+1", answer="2", **given):
    """Lines of one workflow run with one call."""
    call = nat.langchain(f"{uuid}-call", nat.messages(question), answer, parent=f"{uuid}-f", **given)
    steps = nat.workflow(call, question=question, answer=answer, uuid=uuid, run_id=f"run-{uuid}")
    for step in steps:
        step["function_ancestry"]["function_id"] += uuid
    return steps


def lines(*found):
    return [json.dumps(one).encode() for one in found]
