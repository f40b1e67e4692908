"""Texts of a configuration that count as literal secrets, and ordinary values beside them that do not."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config.checks import check_values
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.variables import is_secret_name

KEY = "sk-" + "abcdefghijkl"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"

SECRETS: list[dict[str, Any]] = [
    {"dsn": "Server=db;User Id=sa;Password=hunter22;"},
    {"dsn": "Server=db; User Id=sa; Password=my secret pw"},
    {"dsn": "host=db password='my secret pw'"},
    {"dsn": "host = db password = hunter2"},
    {"dsn": "Driver={ODBC Driver 18 for SQL Server};Server=x;PWD=hunter22"},
    {"dsn": "Server=a,Password=hunter2"},
    {"dsn": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=aGVsbG8=;EndpointSuffix=core.windows.net"},
    {"jaas": 'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="hunter2";'},
    {"dsn": "jdbc:sqlserver://h:1433;databaseName=x;user=sa;password=hunter2"},
    {"dsn": "root:pw12345@tcp(h:3306)/db"},
    {"dsn": "root:hunter2@/db"},
    {"dsn": "root:hunter2@h:3306/db"},
    {"dsn": "scott/tiger12@//h/x"},
    {"dsn": "jdbc:oracle:thin:scott/tiger12@h:1521:x"},
    {"where": "postgresql://u:pa/ss@h"},
    {"where": "postgresql://u:pa?ss@h/db"},
    {"where": "postgresql://u:hunter2${X:-}@h/db"},
    {"where": "http://h/x?api-key=hunter2"},
    {"where": "http://h/x?client_secret=hunter2"},
    {"where": "http://h/x?a=1&auth_token=hunter2"},
    {"where": "http://h/x?accessToken=hunter2"},
    {"where": "https://a.blob.core.windows.net/c?sv=2022&sig=hunter2%3D"},
    {"slack_token": "hunter2"},
    {"bot_token": "hunter2"},
    {"sas_token": "hunter2"},
    {"secret_token": "hunter2"},
    {"X-Auth-Token": "hunter2"},
    {"sasl.password": "hunter2"},
    {"clientSecret": "hunter2"},
    {"dbPassword": "hunter2"},
    {"openaiApiKey": "hunter2"},
    {"accessToken": "hunter2"},
    {"api_key": [KEY]},
    {"password": [12345]},
    {"token": {"value": "hunter2"}},
    {"token": {"a": {"value": ["hunter2"]}}},
    {"api_key": {"openai": "hunter22"}},
    {"password": {"default": "correct horse"}},
    {"auth": f"Bearer {KEY}"},
    {"header": f"Bearer {KEY}"},
    {"headers": {"X-Forwarded": "Bearer abcdefgh"}},
    {"x": "Bearer abcdefgh12345678"},
    {"x": "Basic dTpodW50ZXIy"},
    {"headers": ["X-Auth-Token: hunter2"]},
    {"x": f"${{KEY:-{KEY}}}"},
    {"x": "${KEY:-ghp_abcdefghijklmnopqrst}"},
    {"x": "${KEY:-xoxb-123456789012-abcdef}"},
    {"x": "${KEY:-AKIAABCDEFGHIJKLMNOP}"},
    {"x": "${KEY:-hf_abcdefghijklmnopqrst}"},
    {"x": "${KEY:-glpat-abcdefghijklmnopqrst}"},
    {"x": f"${{KEY:-{JWT}}}"},
    {"x": f"${{KEY:-Bearer {KEY}}}"},
    {"x": "--key=sk-proj-abcdefghijklmnop"},
    {"x": "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEAabc\n-----END RSA PRIVATE KEY-----"},
    {"password": "hunter2${X:-}"},
    {"password": "${X}hunter2"},
    {"token": "abc${X:-<eos>}"},
    {"raw_key": "hunter2"},
    {"authentication": {"key": {"_type": "api_key", "raw_key": "hunter2", "auth_scheme": "Bearer"}}},
    {"master_key": "hunter2"},
    {"Ocp-Apim-Subscription-Key": "hunter2"},
    {"accountKey": "hunter2"},
    {"auth_key": "hunter2"},
    {"x": "Authorization: Bearer hunter2 and more"},
    {"x": "Proxy-Authorization: Basic hunter2\nAccept: text/html"},
    {"x": "Authorization: Bearer ${T} hunter2"},
    {"headers": {"X-Forwarded": "Bearer hunter2 and more"}},
]
ORDINARY: list[dict[str, Any]] = [
    {"max_tokens": 512, "maxTokens": 512, "num_tokens": 3, "token_budget": 4096, "tokens_per_batch": 9},
    {"tokenizer": "Qwen/Qwen3-0.6B", "tokenizer_path": "/models/m1", "tokenization": "bpe"},
    {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<|im_start|>", "unk_token": "[UNK]"},
    {"eosToken": "END", "stop_token": "STOP", "mask_token": "[MASK]", "first_token": "The"},
    {"valid_token": "yes", "rapid_token": "x", "robot_token": "bolt"},
    {"token": "<eos>"},
    {"token": "<|endoftext|>"},
    {"token": "${T:-<eos>}"},
    {"token": ["<eos>", "</s>", "[SEP]"]},
    {"token": {"pad": "<pad>", "level": "mean", "budget": 512}},
    {"secretary": "Anna", "passwordless": "yes", "keyboard": "de", "api_key_file": "/run/secrets/openai"},
    {"secret": {"min": 1, "max": 100}},
    {"credentials": {"type": "oauth2", "username": "user-2024", "file": "/run/secrets/a1.json", "region": "eu-west-1"}},
    {"credentials": {"scopes": ["read", "write", "https://h/auth/v2.read"]}},
    {"api_key": {"env": "OPENAI_KEY_2", "value": "${K}"}},
    {"api_key": ["${K}", "${L:-dummy}", "empty"]},
    {"dsn": "Server=db;User Id=sa;Password=${PW};"},
    {"dsn": "Server=db;User Id=sa;Trusted_Connection=yes;"},
    {"dsn": "host=db password='${PW}'"},
    {"dsn": "Driver={ODBC Driver 18 for SQL Server};Server=x;PWD=${PW}"},
    {"dsn": "root:${PW}@tcp(h:3306)/db"},
    {"dsn": "root@tcp(h:3306)/db"},
    {"dsn": "scott/${PW}@//h/x"},
    {"model": "org/model-7b@main"},
    {"model": "qwen3:8b"},
    {"image": "docker://image:tag@sha256:0123456789abcdef"},
    {"where": "http://h:8080/@scope/package@1.0"},
    {"where": "http://${H}:${PORT}/package@1.0"},
    {"where": "http://h:80?mail=a@b.org"},
    {"where": "postgresql://u:${PW}@h/a@b"},
    {"where": "http://h/x?api-key=${K}&max_token=4"},
    {"where": "http://h/x?tokenizer=abc&sort=key&page_token_size=3"},
    {"where": "s3://bucket/sk-checkpoint/hf_cache/step-100"},
    {"mail": "someone@example.org"},
    {"auth": "Bearer ${T}"},
    {"auth": "none"},
    {"header": "Bearer ${T:-}"},
    {"topic": "Basic arithmetic"},
    {"topic": "Basic algebra-101"},
    {"topic": "Token budgets2"},
    {"topic": "Bearer of news"},
    {"headers": ["Authorization: Bearer ${T}", "Accept: text/html", "X-Request-Id: abc123def"]},
    {"x": "${MODEL:-Qwen/Qwen3-0.6B}"},
    {"x": "${MODEL:-sk-learn}"},
    {"x": "${PATH_OF_MODEL:-/data/hf_models/sk-abcdefghijklmnop1}"},
    {"x": "${NAME:-hf_transformers}"},
    {"x": "sk-multilingual-news"},
    {"x": "task-abcdefghijklmnop1234"},
    {"pattern": r"sk-[A-Za-z0-9]{48}|AKIA[0-9A-Z]{16}|eyJ[\w-]+\.[\w-]+|hf_\w+|password\s*=\s*(\S+)"},
    {"pattern": r"(?<=token=)\w+; (?P<key>[a-z]+)=(\d+)"},
    {"prompt": "See https://h/login for help. The password: hunter2. Say token=x if it works"},
    {"prompt": "Your token is <eos>; your secret: the word. Answer = yes; think first"},
    {"prompt": "A private key begins with -----BEGIN PRIVATE KEY----- and nothing else"},
    {"prompt": "Bearer tokens look like sk-... or ghp_..."},
    {"password": "${X}"},
    {"authorization": "ApiKey ${X}"},
    {"cookie": "session=${SID}"},
    {"api_key": "sk-proj-${X}"},
    {"raw_key": "${K}"},
    {"input_key": "question", "output_key": "answer", "draw_key": "d", "public_key": "pk-lf-12345678"},
    {"x": "Authorization: required for all but the health check"},
    {"x": "Authorization: Bearer ${T}"},
    {"x": "Content-Type: token and more"},
    {"header": "Basic arithmetic, 20 tasks"},
    {"header": "Token budgets of 2025"},
    {"raw_keys": ["a1b2c3d4"], "keys_raw": "a1b2c3d4"},
    {"keymaster": "ann-2025", "master_keyboard": "de-2025"},
    {"account": "a-123456", "subscription": "s-123456", "auth": "none"},
]

SECRETS_OF_COMMANDS = [
    "python agent.py --api-key hunter2",
    "python agent.py --api-key=hunter2 --fast",
    "python agent.py --openaiApiKey 'hunter2 hunter2'",
    "env OPENAI_API_KEY=hunter2 python agent.py",
    "sh -c 'API_TOKEN=hunter2 exec agent'",
    "sh -c 'agent --password hunter2'",
    "agent -H 'Authorization: Bearer hunter2'",
    "agent --db postgresql://u:hunter2@h/x",
    "agent --name=it's --api-key hunter2",
    "docker run --env=HF_TOKEN=hunter2 image",
    "agent --db=postgresql://u:hunter2@h/x.json",
]
ORDINARY_COMMANDS = [
    "python agent.py --api-key-file /run/secrets/key --max-tokens 40",
    "python agent.py --api-key /run/secrets/key --password-stdin",
    "python agent.py --credentials creds.json --api-key",
    "python agent.py --token --verbose",
    "env OPENAI_API_KEY=dummy python agent.py --api-key none",
    "sh -c 'agent --api-key $OPENAI_API_KEY'",
    'sh -c "exec agent --api-key $(cat /run/secrets/key)"',
    "agent --pad_token x --tokenizer m1",
    "agent --password=/run/secrets/pw --api-key=./k",
    "agent --api-key=keys/openai.key --token secrets/tok --db_password=pw.txt",
    "agent --api-key=$KEY --token `cat f` --no-password run",
    "env HF_TOKEN=$HF_TOKEN agent",
    "agent --title a\u00a0b",
    "sh -c 'TOKEN=$(cat /run/secrets/t) PASSWORD=~/pw agent'",
    "sh -c 'curl -H \"Authorization: Bearer $TOKEN\" http://x'",
    "agent --prompt 'The password: hunter2'",
]


@pytest.mark.parametrize("line", SECRETS_OF_COMMANDS)
def test_a_secret_of_a_command_is_refused_without_repeating_it(line: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^a\.environment: secrets are not allowed .*; let the program read"
    ) as refused:
        check_values({"a": {"environment": f"command:{line}"}})
    assert "hunter2" not in str(refused.value)
    assert "${" not in str(refused.value)


@pytest.mark.parametrize("line", ORDINARY_COMMANDS)
def test_an_ordinary_command_is_accepted(line: str) -> None:
    check_values({"workflow": f"command:{line}"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", "hunter2abc"],
        ["--port", "80", "--hf-token", "hunter2"],
        ["-H", "Authorization: Bearer hunter2abc"],
        ["--password", "hunter2", "--verbose"],
    ],
)
def test_a_secret_that_follows_its_option_in_a_list_is_refused(arguments: list[str]) -> None:
    position = next(index for index, one in enumerate(arguments) if "hunter2" in one)
    with pytest.raises(ConfigError, match=rf"^engine\.arguments\.{position}: secrets are not allowed") as refused:
        check_values({"engine": {"arguments": arguments}})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", "${KEY}"],
        ["--token-file", "/run/secrets/a"],
        ["--max-num-batched-tokens", "2048", "--tokenizer-mode", "auto"],
        ["--max-loras", 4],
        ["--api-key", "--port"],
    ],
)
def test_other_items_after_options_in_a_list_are_accepted(arguments: list[Any]) -> None:
    check_values({"engine": {"arguments": arguments}})


def test_there_are_as_many_ordinary_values_as_secrets() -> None:
    assert len(ORDINARY) >= len(SECRETS)


@pytest.mark.parametrize("value", SECRETS, ids=str)
def test_a_literal_secret_is_refused_without_repeating_it(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="secrets are not allowed in the file") as refused:
        check_values({"a": [value]})
    for text in ("abcdefgh", "hunter2", "pw12", "tiger", "12345", "eyJ", "MIIE"):
        assert text not in str(refused.value)


@pytest.mark.parametrize("value", ORDINARY, ids=str)
def test_an_ordinary_value_is_accepted(value: dict[str, Any]) -> None:
    check_values({"a": [value]})


@pytest.mark.parametrize("name", ["PGPASSWORD", "GITHUB_TOKEN", "SLACK_BOT_TOKEN", "ROLLSTREAM_SQL_TOKEN", "APIKey"])
def test_a_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret_name(name)


def test_keys_that_hold_a_secret_in_configurations_of_nat_are_known() -> None:
    found = find_spec("nat")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("NeMo Agent Toolkit is not installed")
    names: set[str] = set()
    for path in (one for folder in found.submodule_search_locations for one in Path(folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "SecretStr" in text:
            names |= {name for name in secret_fields(ast.parse(text)) if len(name) > 1}
    assert "raw_key" in names
    no_secrets = {"username", "public_key"}
    of_no_configuration = {"value"}  # of HeaderCred, CookieCred and QueryCred
    assert {name for name in names - no_secrets - of_no_configuration if not is_secret_name(name)} == set()


def secret_fields(tree: ast.Module) -> set[str]:
    """Names of annotated fields of type SecretStr, or of a type that is called so."""
    return {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if "SecretStr" in ast.unparse(node.annotation)
    }


@pytest.mark.parametrize(
    "piece",
    [
        "a.",
        "a://u:",
        "a=b ",
        "a-a=",
        "{",
        "'",
        "eyJ",
        "eyJa-",
        "sk-",
        "${A:-",
        "a:a@",
        "a=",
        " ",
        "Bearer ",
        "a:bearer a ",
    ],
)
def test_a_long_text_is_looked_through_in_one_pass(piece: str) -> None:
    check_values({"x": piece * (300_000 // len(piece))})
