"""Tiny tokenizers, as engines have them, with a family's special tokens and chat template; each byte is a token."""

from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from rollstream.producers.engines.chat_tokenizer import ChatTokenizer

CALLS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
QWEN3 = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>", *CALLS]
GLM = ["<|endoftext|>", "[gMASK]", "<sop>", *(f"<|{role}|>" for role in ("system", "user", "assistant", "observation"))]
GLM += [*CALLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_QWEN3_TEMPLATE = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ header }}
{%- for tool in tools %}{{ '\n' + tool|tojson }}{% endfor %}{{ footer + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{% if not loop.first or content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_GLM_TEMPLATE = """{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>' + header }}{% for t in tools %}{{ t|tojson + '\n' }}{% endfor %}{{ footer }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|system|>\n' + m.content }}
{%- elif m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\n<think></think>' + ('\n' + m.content if m.content else '') }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value|tojson) + '</arg_value>\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


class SizedTokenizer(ChatTokenizer):
    """An engine's tokenizer, with the length that the scripted engine asks of its own."""

    def __len__(self) -> int:
        return len(self.wrapped)


def qwen3_tokenizer(folder: Path) -> Any:
    """Tokenizer of Qwen3: JSON in <tool_call>, old reasoning dropped."""
    from renderers import qwen3

    texts = {"header": qwen3._TOOLS_HEADER, "footer": qwen3._TOOLS_FOOTER}  # pyright: ignore[reportPrivateUsage]
    return _saved(folder, QWEN3, "<|im_end|>", _QWEN3_TEMPLATE, texts)


def glm_tokenizer(folder: Path) -> Any:
    """Tokenizer of GLM-4.5: <arg_key> and <arg_value> in <tool_call>; the next role's token ends an answer."""
    from renderers import glm45

    texts = {"header": glm45._TOOLS_HEADER, "footer": glm45._TOOLS_FOOTER}  # pyright: ignore[reportPrivateUsage]
    return _saved(folder, GLM, "<|observation|>", _GLM_TEMPLATE, texts)


def _saved(folder: Path, special: list[str], end: str, template: str, texts: dict[str, str]) -> Any:
    vocab = {text: number for number, text in enumerate(["<unk>", *special, *sorted(ByteLevel.alphabet())])}
    sets = "".join(f"{{%- set {name} = {text!r} %}}" for name, text in texts.items())
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        pad_token="<|endoftext|>",
        eos_token=end,
        unk_token="<unk>",
        extra_special_tokens=special,
        chat_template=sets + template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return SizedTokenizer(tokenizer)
