"""Detects secrets in texts: keys of known formats, headers, URLs and DSNs with a password.

Not detected: a secret of unknown format under an ordinary key, or in the path of a URL. References (`${NAME}`) are not
secrets.
"""

import base64
import binascii
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rollstream.schemas.variables import is_secret_name, references, substitute

MAX_REST = 16
"""Maximum length of literal text beside references in a secret: a prefix (`sk-`) or a name (`session=`)."""
MAX_DSN = 4096
"""A longer text is looked through for URLs and keys of known formats alone."""
_PLACEHOLDERS = frozenset({"default", "dummy", "empty", "none", "null", "not-needed", "unused"})
"""Placeholders for the key of a server that needs none."""
_SCHEME = re.compile(r"^(bearer|basic|token|api-?key)\s+", re.IGNORECASE)
"""Prefix of the secret in an Authorization header."""
_BESIDE = re.compile(r"(?:[a-z_-]{1,15}=|[a-z]{1,6}[_-]|\W)*", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z_]{2,12}\]")
"""A tokenizer's token, which is allowed under a key named `token`."""
_KEY = re.compile(
    r"(?<![\w./-])(?:sk-(?:proj|svcacct|admin|or-v1|ant-\w{1,8})-[\w-]{12,}|sk-(?=[a-z]{0,60}\d)[a-z0-9]{16,}"
    r"|gh[opsur]_[a-z0-9]{16,}|github_pat_\w{16,}|xox[a-z]-[\w-]{10,}|(?-i:A[KS]IA[A-Z0-9]{12,})|hf_[a-z0-9]{16,}"
    r"|glpat-[\w-]{12,}|nvapi-[\w-]{16,}|(?-i:AIza[\w-]{30,})|(?-i:eyJ(?:hbGci|0eXAi)\w|eyJ[\w-]{8,}\.[\w-]))"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----\s{1,9}[a-z0-9+/=]{8}",
    re.IGNORECASE,
)
_SHORT_KEY = re.compile(r"sk-[a-z0-9]{12,}|gh[opsur]_[a-z0-9]{8,}", re.IGNORECASE)
"""A key in a default or after `Bearer`; elsewhere it may be a word: sk-multilingual."""
_AUTHORIZATION_KEY = re.compile(r"(^|[._-])(auth|headers?)(\.|$)", re.IGNORECASE)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://(?:\$\{[^}\s]{0,500}\}|[^\s])+", re.IGNORECASE)
_USER_INFO = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,30})://(?:([^\s/?#@]{0,500})|([^\s/?#@:]{0,100}:(?!(?:\d+|\$\{[^}]{0,100}\})[/?#])[^\s@]{0,300}))"
    r"@(?!sha256:)",
    re.IGNORECASE,
)
_QUERY = re.compile(r"[?&;,]([\w.-]{1,60})=([^&;,\s]*)")
_WITHOUT_SCHEME = (
    re.compile(r"[^\s:@/]{0,100}:(\S{1,300}?)@(?:(?:tcp[46]?|unix|udp)\(\S*|/\S*|[\w.-]{1,100}:\d{2,5}(?:/\S*)?)"),
    re.compile(r"(?:jdbc:oracle:\w{1,10}:)?[\w$#]{1,100}/([^\s@/]{1,100})@(?://\S*|[\w.-]{1,100}:\d{2,5}[/:]\S*|\(.*)"),
)
"""Go's MySQL driver and Oracle: user:password@tcp(host)/db, user/password@//host/service."""
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\{[^}]*\}"
_FIELD = re.compile(rf"(?:{_QUOTED}|[^;])+")
_PAIR = re.compile(rf"(?:{_QUOTED}|[^;\s])+")
_WORDS_FIELD = re.compile(r"\s*([a-z][\w.-]*(?: [\w.-]+){0,2})=(.*)", re.IGNORECASE)
_LOGIN_MODULE = re.compile(r"^\s*[\w.]{1,200}LoginModule\s+\w+\s+")
_HEADER = re.compile(r"\s*([\w-]{1,60})\s*:\s*((?:bearer|basic|token|api-?key)\s+\S[\s\S]*|\S+\s*)", re.IGNORECASE)
"""A header as one text: a scheme and all that follows it, or one word."""
_ELSEWHERE = re.compile(r"^[~.]?[./]|^[a-z_.-]+/[\w./-]+$|\.(env|json|key|pem|toml|txt|ya?ml)$")
"""The value of an argument that says where a secret is."""
_OF_SHELL = re.compile(r"\$\([^()]*\)|`[^`]*`|\$\w+")
"""Variables and commands that a shell replaces by their values."""
_TAKES_NO_VALUE = re.compile(r"^-+(no|with|without|require)[-_]", re.IGNORECASE)
_OPTION = re.compile(r"--?[a-z][\w.-]*", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n]")
_PARAMETERS = frozenset({"sig", "signature", "x-amz-signature", "accountkey", "sharedaccesskey"})
_VALUE = frozenset(
    {"current", "data", "default", "key", "keys", "literal", "plain", "plaintext", "raw", "value", "values"}
)
"""Keys of a mapping under a secret's key that hold the secret, whatever it looks like."""
_ABOUT = re.compile(
    r"(^|[._-])(algorithm|alphabet|audience|description|email|endpoint|env|file|header|host|id|issuer|kind|model|name"
    r"|path|prefix|profile|project|provider|realm|region|scheme|scopes?|source|type|ur[il]|user|username|variable|version)$",
    re.IGNORECASE,
)
"""Keys there that say something about the secret."""


def is_placeholder(text: str) -> bool:
    """Whether a key is a placeholder for a required but unused key."""
    return not text or text.lower() in _PLACEHOLDERS


def secret_above(key: str, secret: str) -> tuple[str, bool]:
    """The key of the secret that the value of `key` belongs to, and whether only random-looking values count."""
    if is_secret_name(key):
        return key, False
    return ("", False) if _ABOUT.search(key) else (secret, key.lower() not in _VALUE)


def is_secret(text: str, key: str = "") -> bool:
    """Whether the value of a secret `key` is a secret: checks the text outside references, and their defaults."""
    if key.lower().endswith("token"):
        text = _SPECIAL_TOKEN.sub("", text)
    text = _SCHEME.sub("", text.strip())
    defaults = [match[2] for match in references(text) if match[2]]
    if any(is_secret(default) for default in defaults):
        return True
    rest = substitute(text, lambda _: "")
    if rest != text:
        return len(rest) > MAX_REST or _BESIDE.fullmatch(rest) is None
    return not is_placeholder(text)


def looks_random(text: str) -> bool:
    """Whether a text is a single word that mixes letters and digits."""
    return all(re.search(pattern, text) for pattern in (r"^[^\s/:<>{}]{6,500}$", r"\d", r"[A-Za-z]")) or _is_key(text)


def secret_in(text: str, path: str = "") -> str | None:
    """The name of the secret in a text, whatever the key at `path`; None if the text contains none."""
    if _KEY.search(text) or any(_is_key(match[2] or "") for match in references(text)) or _is_credential(text, path):
        return "API_KEY"
    if any(_passwords(text)):
        return "PASSWORD"
    return next(
        (name for name, value in _parameters(text) if _is_secret_parameter(name) and is_secret(value, name)), None
    )


def secret_in_command(line: str) -> str | None:
    """The name of the option or variable of a command line whose value is a secret; None if there is none.

    Values that a shell makes (`$NAME`) and paths are none.
    """
    line = _OF_SHELL.sub("${OF_SHELL}", line)
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    return next(filter(None, map(_secret_in_word, words, [*words[1:], ""])), None)


def secret_in_arguments(items: Sequence[object]) -> tuple[int, str] | None:
    """The index of the first secret that follows its option (`--api-key`, VALUE) in a list of arguments, and the
    option's name.
    """
    for index, (option, value) in enumerate(pairwise(items), start=1):
        if isinstance(option, str) and isinstance(value, str) and _OPTION.fullmatch(option):
            name = _secret_in_word(option, value)
            if name is not None:
                return index, name
    return None


def _secret_in_word(word: str, following: str) -> str | None:
    """The name of the secret in a word of a command line, or in the one after it, if that is its value."""
    if _SPACE.search(word) and not _HEADER.fullmatch(word) and not _SCHEME.match(word):
        return secret_in_command(word)
    name, equals, value = word.partition("=")
    if not equals and word.startswith("-") and not following.startswith("-") and not _TAKES_NO_VALUE.match(word):
        value = following
    is_elsewhere = "://" not in value and _ELSEWHERE.search(value) is not None
    if is_secret_name(name.lstrip("-")) and not is_elsewhere and is_secret(value):
        return name.lstrip("-")
    found = None if equals and is_elsewhere else secret_in(word)
    if found is None and equals and "=" in value:  # --env=NAME=VALUE
        return secret_in_command(value)
    return None if found is None else found.lstrip("-")


def _is_key(text: str) -> bool:
    return bool(_KEY.search(text) or _SHORT_KEY.fullmatch(_SCHEME.sub("", text.strip())))


def _is_credential(text: str, path: str) -> bool:
    """Whether a text is the value of an Authorization header."""
    scheme = _SCHEME.match(text) if len(text) <= MAX_DSN else None
    if scheme is None:
        return False
    rest = text[scheme.end() :].strip()
    if _AUTHORIZATION_KEY.search(path):
        is_title = " " in rest and scheme[1].lower() != "bearer"  # header: Basic arithmetic
        return not is_title and is_secret(rest)
    if scheme[1].lower() == "basic":
        return _is_basic(rest)
    return _is_key(rest) or (scheme[1].lower() == "bearer" and len(rest) >= 8 and looks_random(rest))


def _is_basic(text: str) -> bool:
    try:
        return b":" in base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False


def _passwords(text: str) -> Iterator[bool]:
    for scheme, user_info, more in _USER_INFO.findall(text):
        _, colon, password = (user_info or more).partition(":")
        is_token = scheme.lower().startswith("http") and not colon  # https://TOKEN@host
        yield is_secret(user_info if is_token else password)
    for pattern in _WITHOUT_SCHEME if len(text) <= MAX_DSN and "://" not in text else ():
        match = pattern.fullmatch(text.strip())
        yield match is not None and is_secret(match[1])


def _is_secret_parameter(name: str) -> bool:
    return name.lower() in _PARAMETERS or is_secret_name(name)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Names and values in the queries of URLs, of a DSN, or of a header that is written as one text."""
    for url in _URL.finditer(text):
        yield from _QUERY.findall(url[0])
    if len(text) > MAX_DSN:
        return
    header = _HEADER.fullmatch(text)
    if header is not None and ("-" in header[1] or header[1].lower() == "authorization"):
        yield header[1].replace("-", "_"), header[2]
    yield from _dsn(_LOGIN_MODULE.sub("", text))


def _dsn(text: str) -> list[tuple[str, str]]:
    """The fields of a DSN; empty for a text with anything besides `name=value`, such as prose that mentions a
    password."""
    fields = [field for field in _FIELD.findall(re.sub(r"\s*=\s*", "=", text)) if field.strip()]
    found: list[tuple[str, str]] = []
    for field in fields:
        pairs = _PAIR.findall(field)
        words = _WORDS_FIELD.fullmatch(field) if ";" in text else None
        if all("=" in pair for pair in pairs):
            found += [one for pair in pairs for one in _pairs_of(pair)]
        elif words is not None:
            found.append((words[1].replace(" ", "_"), words[2].strip()))
        else:
            return []
    return found


def _pairs_of(text: str) -> list[tuple[str, str]]:
    """Splits `a=b,c=d` at commas outside quotes and braces."""
    name, _, value = text.partition("=")
    if value[:1] in ("'", '"', "{"):
        return [(name, value.rstrip(",")[1:-1])]
    return [(name, value.split(",")[0]), *_QUERY.findall(text)]
