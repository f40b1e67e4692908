"""Makes a tiny model in place: a Qwen2 of about 84,000 parameters that reads ASCII characters. For demos and tests.

Untrained: its answers are noise until a run trains it. Other characters than printable ASCII and newline are not read.
"""

import json
import string
from pathlib import Path
from typing import Any

from rollstream.eventlog.files import beside
from rollstream.schemas.devices import MODEL_LOADING
from rollstream.schemas.errors import ModelError

PAD, END = "<|pad|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
BYTE_LEVEL = {ord(" "): "Ġ", ord("\n"): "Ċ"}
"""Characters that byte-level vocabularies spell differently."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One marker opens a turn; only an answer has an end, so a turn is its text and one or two tokens."""
STAMP = "rollstream_tiny.json"
"""Record of the arguments: a folder made with the same ones is left as it is."""


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    intermediate_size: int = 136,
    max_length: int = 512,
    initializer_range: float = 0.1,
    is_tied: bool = True,
) -> Path:
    """A transformers folder with model and tokenizer; equal arguments give equal bytes, and a made one is kept.

    `is_tied`: whether the head has the weights of the embeddings; else it has its own, which are equal to begin with.
    Raises ModelError if `folder` holds something else.
    """
    shape: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_length,
        "initializer_range": initializer_range,
        **({} if is_tied else {"tie_word_embeddings": False}),
    }
    stamp = json.dumps({"made_by": "rollstream tiny-model", "seed": seed, **shape}, sort_keys=True)
    if _holds(folder, stamp):
        return folder
    with beside(folder) as made:
        _save_tokenizer(made, max_length)
        _save_model(made, seed, shape)
        (made / STAMP).write_text(stamp, encoding="utf-8")
    return folder


def _holds(folder: Path, stamp: str) -> bool:
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} exists and is not a folder; name a new folder")
    made = folder / STAMP
    if made.is_file():
        if made.read_text(encoding="utf-8") == stamp:
            return True
        raise ModelError(f"{folder} holds a tiny model of another seed or shape; remove it or name another folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ModelError(f"{folder} holds something else; name another folder for the tiny model")
    return False


def _vocabulary() -> dict[str, int]:
    # Digits come first after the special tokens, so that short examples need only small ids.
    letters = string.digits + "".join(character for character in CHARACTERS if character not in string.digits)
    texts = (PAD, END, *(f"<|{role}|>" for role in ROLES), *letters.translate(BYTE_LEVEL))
    return {text: number for number, text in enumerate(texts)}


def _save_tokenizer(folder: Path, max_length: int) -> None:
    # The class that AutoTokenizer takes for a Qwen2 folder, whatever class was saved.
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab=_vocabulary(),
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        extra_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path, seed: int, shape: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    vocabulary = _vocabulary()
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=vocabulary[PAD],
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        **{"tie_word_embeddings": True, **shape},
    )
    with MODEL_LOADING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if not config.tie_word_embeddings:
        model.lm_head.load_state_dict(model.model.embed_tokens.state_dict())
    model.save_pretrained(folder)
