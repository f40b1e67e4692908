"""A transformers tokenizer for rollouts: equal ids and texts, without most of the cost of each call.

The rollouts of a group begin with one prompt, and transformers takes ten times as long to prepare a short call as its
backend takes to tokenise. Calls with other options than a rollout's go to the tokenizer itself.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from transformers import AutoTokenizer

from rollstream.schemas.errors import ModelError
from rollstream.schemas.variables import one_line

MAX_ENTRIES = 8192
MAX_CHARACTERS = 1 << 23
"""Maximum characters of the texts that a cache remembers: 8 MiB or a few times that."""
MAX_TOKEN_TEXTS = 1 << 18
"""Maximum number of remembered texts of single tokens: enough for all of most vocabularies."""
_PROBE = "a b  c\n0 <|im_end|> \u00e9\u4e2d"
_PROBE_CHAT = [{"role": "user", "content": _PROBE}]
_RENDERED = {"tokenize", "add_generation_prompt", "tools"}
"""Options that `_template_of` knows."""
Value = TypeVar("Value")


class TextCache:
    """The results of pure functions of text, bounded by number and by size; the least recently used go first."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_characters: int = MAX_CHARACTERS) -> None:
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._max_entries, self._max_characters = max_entries, max_characters
        self._characters = 0

    def get(self, key: Hashable, size: int, compute: Callable[[], Value]) -> Value:
        """The value of `key`, computed unless it is remembered. `size`: characters that remembering it takes."""
        if (found := self._found.get(key)) is not None:
            self._found.move_to_end(key)
            return found[0]
        value = compute()
        if size > self._max_characters // 4:
            return value
        self._found[key] = value, size
        self._characters += size
        while self._characters > self._max_characters or len(self._found) > self._max_entries:
            _, (_, freed) = self._found.popitem(last=False)
            self._characters -= freed
        return value


class ChatTokenizer:
    """`base.Tokenizer` over a transformers tokenizer, whose other attributes it passes on. Used from one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self.wrapped = tokenizer
        self.eos_token_id: int = tokenizer.eos_token_id
        self._ids, self._texts = TextCache(), TextCache()
        self._token_texts: dict[tuple[int, bool], str] = {}
        """Texts of single tokens, of which every answer is composed; bounded by MAX_TOKEN_TEXTS."""
        self._backend = _backend_of(tokenizer)
        self._template = _template_of(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Text of messages, as the tokenizer's own method returns it."""
        try:
            key = orjson.dumps([conversation, options])
        except TypeError:  # what JSON cannot hold: for the template to take or to refuse
            return self.wrapped.apply_chat_template(conversation, **options)
        if options.get("tokenize", True):
            return self.wrapped.apply_chat_template(conversation, **options)
        return self._texts.get(key, 3 * len(key), lambda: self._written(conversation, options))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, in a list of the caller's own."""
        key = text, add_special_tokens
        return self._ids.get(key, 5 * len(text), lambda: self._encoded(text, add_special_tokens)).copy()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        if len(token_ids) != 1:
            return self._decoded(token_ids, skip_special_tokens)
        key = token_ids[0], skip_special_tokens
        text = self._token_texts.get(key)
        if text is None:
            text = self._decoded(token_ids, skip_special_tokens)
            if len(self._token_texts) < MAX_TOKEN_TEXTS:
                self._token_texts[key] = text
        return text

    def _written(self, conversation: list[dict[str, Any]], options: dict[str, Any]) -> str:
        tools = options.get("tools") or ()
        is_known = conversation and not options.keys() - _RENDERED and all(isinstance(tool, dict) for tool in tools)
        if self._template is None or not is_known:
            return self.wrapped.apply_chat_template(conversation, **options)
        return self._template(conversation, **options)

    def _decoded(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._backend is None:
            return self.wrapped.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            return list(self.wrapped.encode(text, add_special_tokens=add_special_tokens))
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids


def _backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` below a fast tokenizer; None where it gives other ids or texts, or there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    for with_special in (True, False):
        ids = tokenizer.encode(_PROBE, add_special_tokens=with_special)  # also turns truncation and padding off
        if list(ids) != backend.encode(_PROBE, add_special_tokens=with_special).ids:
            return None
        if tokenizer.decode(ids) != backend.decode(list(ids), skip_special_tokens=False):
            return None
    return backend


def _template_of(tokenizer: Any) -> Callable[..., str] | None:
    """The chat template below `apply_chat_template`, which looks it up and copies jinja's globals for each text, at six
    times the cost of a short one; None where it gives another text, or there is none.
    """

    def render(
        conversation: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        variables = {"messages": conversation, "tools": tools, "add_generation_prompt": add_generation_prompt}
        context = template.new_context(constant | variables, shared=True)
        try:
            return template.environment.concat(template.root_render_func(context))
        except Exception:  # noqa: BLE001 -- whatever it is, jinja raises it with lines of the template
            return template.environment.handle_exception()

    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = _compile_jinja_template(tokenizer.chat_template)
        constant = {**template.globals, **tokenizer.special_tokens_map, "documents": None}
        expected = tokenizer.apply_chat_template(_PROBE_CHAT, tokenize=False, add_generation_prompt=True)
        return render if render(_PROBE_CHAT, add_generation_prompt=True) == expected else None
    except Exception:  # noqa: BLE001 -- a template is a program by the model's maker and may raise anything
        return None


def load_tokenizer(base_model: str) -> ChatTokenizer:
    """A base model's tokenizer. Raises ModelError if it is missing or empty, or has no end token or chat template."""
    check_folder(base_model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base_model, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"model {base_model} has no tokenizer that can be loaded: {one_line(error)}; add its "
            "files to the model's folder, or download it first"
        ) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # made by transformers if the folder has no files of one
        raise ModelError(f"the tokenizer of model {base_model} is empty; add tokenizer.json to the model's folder")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of model {base_model} has no end token; set eos_token in its configuration")
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer of model {base_model} has no chat template; add chat_template.jinja to it")
    return ChatTokenizer(tokenizer)


def check_folder(base_model: str) -> None:
    """Raises ModelError for a path that looks like a folder and does not exist."""
    looks_local = base_model.startswith((".", "/", "~")) or base_model.count("/") > 1
    if looks_local and not Path(base_model).is_dir():
        raise ModelError(f"model folder {base_model} does not exist here; give a transformers folder or a hub name")
