"""A small tokenizer as those of Llama 2, Mistral and Phi-3 are: `▁` for spaces, bytes for what it does not know."""

from typing import Any

from transformers import LlamaTokenizer

from rollstream.producers.engines.chat_tokenizer import ChatTokenizer

CHARACTERS = "▁abcdefghijklmnopqrstuvwxyzH.,!?[]/<>|"
MERGES = [("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("▁", "Hello"), ("▁", "h"), ("▁h", "i"), ("▁", "[")]
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def llama_tokenizer(template: str = PHI) -> Any:
    """The tokenizer as an engine has it, with the special tokens of a chat template."""
    is_phi = template == PHI
    end, more = ("<|end|>", ["<|user|>", "<|assistant|>"]) if is_phi else ("</s>", ["[INST]", "[/INST]"])
    names = ["<unk>", "<s>", end, *more, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]
    names += [left + right for left, right in MERGES]
    made = LlamaTokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=MERGES,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token=end,
        extra_special_tokens=more,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    return ChatTokenizer(made)
