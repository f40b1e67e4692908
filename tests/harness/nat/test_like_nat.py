"""Our data models and interfaces beside those of the installed NAT 1.9: names, fields, validation, signatures."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("nat") is None, reason="needs rollstream[nat]")]
OURS, THEIRS = 0, 1


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    program = Path(__file__).with_name("nat_reflection.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_name_of_nat_is_there(seen: dict[str, Any]) -> None:
    theirs, ours = seen["names"]
    assert set(theirs) <= set(ours)


def test_every_field_has_its_default(seen: dict[str, Any]) -> None:
    ours, theirs = seen["fields"]
    assert len(theirs) == 58
    assert ours == theirs


def test_input_is_refused_or_validated_as_by_nat(seen: dict[str, Any]) -> None:
    ours, theirs = seen["validation"]
    for given, mine, their in zip(seen["inputs"], ours, theirs, strict=True):
        assert mine == their, given


def test_a_class_gets_its_type_as_in_nat(seen: dict[str, Any]) -> None:
    assert seen["named types"][OURS] == seen["named types"][THEIRS]


def test_every_member_of_the_interfaces_has_its_signature(seen: dict[str, Any]) -> None:
    ours, theirs = seen["signatures"]
    assert len(theirs) == 26
    for member, signature in theirs.items():
        assert ours[member] == signature, member


def test_concrete_methods_of_the_interfaces_behave_as_nats(seen: dict[str, Any]) -> None:
    assert seen["behaviour"][OURS] == seen["behaviour"][THEIRS]
