"""References to variables: what counts as one, and that any text is looked through once."""

import base64
import json

import pytest

from rollstream.schemas.errors import ConfigError
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.variables import conceal, expand, variables_in


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("${A}/${B:-b}", "1/b"),
        ("${A:-x}", "1"),
        ("${B:-}", ""),
        ("${B:-${A}", "${A"),
        ("${A} ${A", "1 ${A"),
        ("${A}}", "1}"),
        ("$A {A} ${} ${:-x}", "$A {A} ${} ${:-x}"),
        ("${A:-unclosed", "${A:-unclosed"),
        ("", ""),
    ],
)
def test_a_reference_is_closed_and_has_a_name(text, expanded):
    assert expand(text, {"A": "1"}) == expanded


def test_a_variable_that_is_not_set_is_named_with_its_path():
    with pytest.raises(ConfigError, match=r"a\.b: environment variable C is not set"):
        expand({"a": {"b": "${A} ${C}"}}, {"A": "1"})
    with pytest.raises(ConfigError, match=r"a: environment variable C is empty; give it a value or write \$\{C:-def"):
        expand({"a": "${C}"}, {"C": ""})


@pytest.mark.parametrize("piece", ["${A:-", "${A:-x", "${A", "${", "$", "}"])
def test_a_long_text_of_unclosed_references_is_looked_through_once(piece):
    """Quadratic time would take hours for a megabyte."""
    text = piece * (1_000_000 // len(piece))
    assert variables_in(text) == frozenset()
    assert expand(text, {}) == text
    assert variables_in(f"${{A}}{text}") == {"A"}


def test_the_password_of_a_url_is_concealed_as_it_is_sent_too() -> None:
    sent = base64.b64encode(b"bot:hunter 22").decode()
    reported = conceal(f"401: Basic {sent}", "${URL}/v1", {"URL": "http://bot:hunter%2022@h:80"})
    assert reported == "401: Basic ${URL}"


def test_a_secret_is_concealed_however_a_message_quotes_it() -> None:
    key = '-----BEGIN KEY-----\nMIIB"quoted\\" and 0123456789\n-----END KEY-----'
    env = {"KEY": key}
    for message in (key, repr(key), json.dumps(key), f"line 2: {key.splitlines()[1]}"):
        text = conceal(f"refused: {message}", "${KEY}", env)
        assert "MIIB" not in text
        assert "${KEY}" in text


def test_a_secret_is_concealed_that_no_permission_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cr3t-value")
    assert Permissions().conceal("KeyError: 's3cr3t-value'") == "KeyError: '${MY_SECRET}'"


@pytest.mark.parametrize("name", ["https_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_user_and_password_of_a_proxy_are_concealed_and_its_host_is_not(name: str, scheme: str) -> None:
    env = {name: f"{scheme}svc:Sesame%211@proxy:3128"}
    text = conceal("http://svc:Sesame%211@proxy:3128 refused Sesame!1", None, env)
    assert text == f"http://${{{name}}}@proxy:3128 refused ${{{name}}}"
    assert conceal("http://proxy:3128", None, {name: "http://proxy:3128"}) == "http://proxy:3128"
    assert conceal("the user has no access", None, {name: f"{scheme}user@proxy:3128"}) == "the user has no access"
