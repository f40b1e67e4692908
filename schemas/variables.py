"""Expansion of `${NAME}` and `${NAME:-default}` in configuration values, at the place where a value is used.

What is stored or sent keeps the unexpanded text, and an error's text is concealed before it enters a record, so that a
secret never enters the log.
"""

import base64
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import unquote

from pydantic import JsonValue

from rollstream.schemas.errors import ConfigError

MAX_MESSAGE = 500
"""Characters of what others' code raised that an event holds."""
MAX_JOB_ERROR = 4000
"""Characters of the reason why a job or run failed: users' code may raise a message of any length."""
MIN_SECRET_CHARS = 4
"""A shorter value is left in messages: to replace it would garble them and keep no secret."""
MIN_PATH_CHARS = 12
"""The same of a URL's path, since `/v1/` or `/generate` keeps no secret."""
_SECRET_NAME = re.compile(
    r"passw(or)?d$|(^|[._-])((access|account|api|auth|encryption|hmac|master|private|raw|secret|signing|subscription)"
    r"[_-]?key|pwd|passphrase|secret|credentials?|authorization|cookie)$"
    r"|(^|(access|api|auth|bearer|hub|oauth|refresh|session|endpoint|sql|secret)[._-]?)token$"
    r"|(^|[._-])(admin|app|aws|azure|bot|ci|databricks|deploy|device|discord|gh|gitlab|google|hf|huggingface|id|jwt"
    r"|npm|openai|personal|private|pypi|registry|sas|security|service|slack|telegram|vault|wandb|webhook)[._-]?token$",
    re.IGNORECASE,
)
_PROXY_NAME = re.compile(r"_proxy$", re.IGNORECASE)
_FOLDER = "PWD"
"""Variable of shells for the current folder, whose name resembles that of a password."""
_named: set[str] = set()
"""Variables that the configurations read by this process name: as many as these."""
_WORD_BEGINS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
"""A reference without a default."""
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
"""A reference with or without a default."""


def expand(value: JsonValue, env: Mapping[str, str], path: str = "") -> JsonValue:
    """`value` with every reference in its strings replaced. Keys are left alone.

    Raises ConfigError naming the path and the variable that is not set and has no default.
    """
    if isinstance(value, str):
        return _expand_text(value, env, path)
    if isinstance(value, list):
        return [expand(item, env, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: expand(item, env, f"{path}.{key}" if path else key) for key, item in value.items()}
    return value


def variables_in(value: JsonValue) -> frozenset[str]:
    """Names of all variables that the strings of a value refer to."""
    if isinstance(value, str):
        return frozenset(match.group(1) for match in references(value))
    if isinstance(value, (list, dict)):
        items = value.values() if isinstance(value, dict) else value
        return frozenset(name for item in items for name in variables_in(item))
    return frozenset()


def references(text: str) -> Iterator["re.Match[str]"]:
    """Every `${NAME}` and `${NAME:-default}` of a text: groups are the name and the default, None without one."""
    return REFERENCE.finditer(text, 0, _end(text))


def substitute(text: str, replacement: Callable[["re.Match[str]"], str]) -> str:
    """`text` with every reference replaced."""
    end = _end(text)
    return REFERENCE.sub(replacement, text[:end]) + text[end:]


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds a secret: `HF_TOKEN`, `password`, `clientSecret`, ..."""
    return any(_SECRET_NAME.search(text) for text in (name, _WORD_BEGINS.sub("_", name)))


def as_written(value: JsonValue, written: JsonValue, env: Mapping[str, str], source: JsonValue = None) -> JsonValue:
    """`value` with each text in it as it was written at the same key or index of `source`.

    A text that `source` does not give is put back as the text of `written` that has its value: several may have one.
    """
    references = {text: expand(text, env) for text in _references_in(written)}
    return _restored(value, source, {str(found): text for text, found in references.items()}, env)


def conceal_variables(names: Iterable[str]) -> None:
    """Let `conceal` conceal the values of these variables too from now on."""
    _named.update(names)


def conceal(message: str, value: JsonValue = None, env: Mapping[str, str] = os.environ) -> str:
    """`message` with the values of variables written as `${NAME}`: for logs, errors, events and dead letters.

    Concealed are the variables that `value` refers to, those of `conceal_variables`, and those whose name marks them as
    secrets, whether a configuration names them or not: users' code reads them too. Of the variables of proxies, user
    and password are.
    """
    asked = {(name, env.get(name, "")) for name in variables_in(value) | _secret_names(env)}
    asked |= {(name, os.environ.get(name, "")) for name in _named | _secret_names(os.environ)}
    found = [(secret, name) for name, text in asked for secret in _secrets_in(text)]
    proxies = {item for one in (env, os.environ) for item in one.items() if _PROXY_NAME.search(item[0])}
    found += [(secret, name) for name, text in proxies for secret in _secrets_of_proxy(user_info_of(text)[0])]
    for secret, name in sorted(found, key=lambda item: (-len(item[0]), item)):  # one may be a part of another
        message = message.replace(secret, f"${{{name}}}")
    return message


def user_info_of(url: str) -> tuple[str, str]:
    """User and password of a URL, empty if it has none, and the URL without them; also of one that is malformed."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    user_info, _, host = rest.rpartition("@")
    return user_info, f"{scheme}{separator}{host}"


def basic_credentials(user_info: str) -> str:
    """A URL's user and password as they are sent in a header, after `Basic` (RFC 7617)."""
    sent = user_info if ":" in user_info else f"{user_info}:"
    return base64.b64encode(unquote(sent).encode()).decode()


def one_line(error: object, max_chars: int | None = 300) -> str:
    """The text of an error, or a text, on one line without secrets; None: of any length.

    It is concealed before it is cut: of a secret across the cut a part would remain, which nobody recognises.
    """
    line = " ".join(conceal(str(error)).split())
    return line if max_chars is None or len(line) <= max_chars else line[: max_chars - 3] + "..."


def recordable(message: str, max_chars: int = MAX_MESSAGE) -> str:
    """A message as an event can hold it: on one line without secrets, of a bounded length, and encodable."""
    return one_line(encodable(message), max_chars)


def traceback_of(error: BaseException) -> str:
    """The lines of an exception's traceback, for a log."""
    try:
        lines = traceback.format_exception(error)
    except Exception:  # noqa: BLE001 -- others' exceptions may raise where they are shown
        lines = traceback.format_tb(error.__traceback__)
    return encodable("\n" + "".join(lines).rstrip())


def encodable(text: str) -> str:
    """`text` with lone surrogates written out, which fit in no event and in no log."""
    return text.encode(errors="backslashreplace").decode()


def _secret_names(env: Mapping[str, str]) -> set[str]:
    return {name for name in env if is_secret_name(name)} - {_FOLDER}


def _secrets_in(value: str) -> Iterator[str]:
    """Parts of a variable to be concealed: all of it, also as quoted by Python and JSON, the long lines of a key file,
    and the parts of a URL, which servers repeat by themselves.
    """
    if len(value) >= MIN_SECRET_CHARS:
        yield from {value: None, repr(value)[1:-1]: None, json.dumps(value)[1:-1]: None}
    if "\n" in value:
        yield from (line for line in map(str.strip, value.splitlines()) if len(line) >= MIN_PATH_CHARS)
    if "://" in value:
        user_info, without = user_info_of(value)
        yield from _secrets_of_user(user_info)
        _, _, host = without.partition("://")
        path = host.partition("/")[2]
        yield from (part for part in (path, *path.split("?")) if len(part) >= MIN_PATH_CHARS)


def _secrets_of_user(user_info: str) -> Iterator[str]:
    """Parts of a URL's user and password, as written and as sent."""
    if user_info:
        password = user_info.partition(":")[2]
        parts = {user_info: None, password: None, unquote(password): None, basic_credentials(user_info): None}
        yield from (part for part in parts if len(part) >= MIN_SECRET_CHARS)


def _secrets_of_proxy(user_info: str) -> Iterator[str]:
    """The same of a proxy, whose user without a password is only a name, which other texts may hold too."""
    yield from _secrets_of_user(user_info) if ":" in user_info else ()


def _end(text: str) -> int:
    """Position where the last reference can end, so that no `${NAME:-` is searched to the end of the text."""
    return text.rfind("}") + 1


def _references_in(value: JsonValue) -> Iterator[str]:
    if isinstance(value, str):
        if next(references(value), None) is not None:
            yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _references_in(item)


def _restored(value: JsonValue, source: JsonValue, texts: Mapping[str, str], env: Mapping[str, str]) -> JsonValue:
    if isinstance(value, str):
        is_from_there = isinstance(source, str) and expand(source, env) == value
        return source if is_from_there else texts.get(value, value)
    if isinstance(value, list):
        sources = source if isinstance(source, list) and len(source) == len(value) else [None] * len(value)
        return [_restored(item, one, texts, env) for item, one in zip(value, sources, strict=True)]
    if isinstance(value, dict):
        block = source if isinstance(source, dict) else {}
        return {key: _restored(item, block.get(key), texts, env) for key, item in value.items()}
    return value


def _expand_text(text: str, env: Mapping[str, str], path: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        found = env.get(name) or default
        if found is None:
            what, remedy = ("empty", "give it a value") if name in env else ("not set", "set it")
            raise ConfigError(f"{path}: environment variable {name} is {what}; {remedy} or write ${{{name}:-default}}")
        return found

    return substitute(text, replacement)
