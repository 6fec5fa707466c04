"""Chat templates of the families that matter, cut down to what they do between turns, and tokenizers for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.tokenizer import Tokenizer

CORPUS = [
    "What is the weather in Paris today? It is 7.\n\nAre you sure?\n\nYes.\n",
    'assistant\nuser\nsystem\ntool {"name": "calculator", "arguments": {"expression": "3 + 4"}}\n',
    "Let me see.\n</think>\n\nThe answer is 42.\n\n\n   spaces    and\ttabs\n",
]

_CHATML_TOOLS = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}"
    "# Tools\n<tools>{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{%- endfor %}\n</tools><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
)
_CHATML_RESULT = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}"
)
_CHATML_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{%- if content or not loop.first %}{{ '\n' }}{%- endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) }}'
    "{{ '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
)

QWEN25 = (
    _CHATML_TOOLS + "{%- for message in messages %}"
    "{%- set content = message.content or '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + content }}"
    + _CHATML_CALLS
    + _CHATML_RESULT
    + "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

QWEN3 = (
    _CHATML_TOOLS + "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}{%- for message in messages %}"
    "{%- set content = message.content or '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set thought = message.reasoning_content or '' %}"
    "{%- if not thought and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{ content }}{%- endif %}"
    + _CHATML_CALLS
    + _CHATML_RESULT
    + "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{%- if message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- else %}"
    "{%- if tools and loop.first %}{%- for tool in tools %}{{ (tool | tojson) + '\n\n' }}{%- endfor %}{%- endif %}"
    "{{ message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

MISTRAL = (
    "{{ bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools and message == users[-1] %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}"
    "{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids of tool calls have 9 characters') }}{%- endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{{ ', ' if not loop.last else '' }}{%- endfor %}{{ ']' + eos_token }}"
    "{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    '{{ \'[TOOL_RESULTS] {"content": \' + (message.content | tojson) + \', "call_id": "\' + message.tool_call_id }}'
    "{{ '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{ raise_exception('only user, assistant and tool') }}{%- endif %}{%- endfor %}"
)

GEMMA = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ message.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)

DEEPSEEK_R1 = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{ message.content }}"
    "{%- elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{%- else %}{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{%- endif %}"
)

GLM = (
    "[gMASK]<sop>{%- if tools %}{{ '<|system|>\n# Tools' }}{%- for tool in tools %}{{ '\n' + (tool | tojson) }}"
    "{%- endfor %}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{%- if loop.index0 > ns.last and message.reasoning_content %}"
    "{{ '\n<think>' + message.reasoning_content.strip() + '</think>' }}{%- else %}{{ '\n<think></think>' }}{%- endif %}"
    "{%- if message.content %}{{ '\n' + message.content.strip() }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) }}"
    "{{ '</arg_value>' }}"
    "{%- endfor %}{{ '\n</tool_call>' }}{%- endfor %}"
    "{%- elif message.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- else %}{{ '<|' + message.role + '|>\n' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)

HARMONY = (
    "<|start|>system<|message|>You are a model.<|end|>"
    "{%- if tools %}{{ '<|start|>developer<|message|># Tools' + (tools | tojson) + '<|end|>' }}{%- endif %}"
    "{%- set ns = namespace(name=none) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{%- endif %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ (call.arguments | tojson) + '<|call|>' }}{%- set ns.name = call.name %}"
    "{%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{%- endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- set ns.name = none %}"
    "{%- elif message.role == 'tool' %}"
    "{%- if ns.name is none %}{{ raise_exception('a tool message without a call') }}{%- endif %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ (message.content | tojson) + '<|end|>' }}"
    "{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template with its marks."""

    template: str
    eos: str
    special: list[str]
    text_marks: list[str] = field(default_factory=list[str])
    """Added tokens that are text, such as <think>."""
    bos: str | None = None
    end: list[str] = field(default_factory=list[str])
    """Further tokens that end a turn, as in the model's generation config."""
    words: bool = False
    """Whether the tokenizer marks the starts of words, as sentencepiece does."""
    has_tools: bool = True
    drops_reasoning: bool = False


def _bracketed(*names: str) -> list[str]:
    return [f"[{slash}{name}]" for name in names for slash in ("", "/")]


_CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_THINK = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(template=QWEN25, eos="<|im_end|>", special=_CHATML, text_marks=_THINK[2:4]),
    "qwen3": Family(template=QWEN3, eos="<|im_end|>", special=_CHATML, text_marks=_THINK, drops_reasoning=True),
    "smollm2": Family(template=SMOLLM2, eos="<|im_end|>", special=_CHATML, has_tools=False),
    "llama3": Family(
        template=LLAMA3,
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        special=["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    ),
    "mistral": Family(
        template=MISTRAL,
        eos="</s>",
        bos="<s>",
        special=["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", *_bracketed("AVAILABLE_TOOLS", "TOOL_RESULTS")],
        words=True,
    ),
    "gemma": Family(
        template=GEMMA,
        eos="<end_of_turn>",
        bos="<bos>",
        special=["<bos>", "<start_of_turn>", "<end_of_turn>"],
        has_tools=False,
        words=True,
    ),
    "deepseek-r1": Family(
        template=DEEPSEEK_R1,
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        special=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        text_marks=["<think>", "</think>"],
        has_tools=False,
        drops_reasoning=True,
    ),
    "glm": Family(
        template=GLM,
        eos="<|endoftext|>",
        special=["[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        text_marks=_THINK,
        end=["<|user|>", "<|observation|>"],
        drops_reasoning=True,
    ),
    "harmony": Family(
        template=HARMONY,
        eos="<|return|>",
        special=["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"],
        drops_reasoning=True,
    ),
}


@cache
def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with merges, trained on a few lines, with the family's template and marks."""
    marks = FAMILIES[family]
    backend = Backend(models.BPE(unk_token="<unk>" if marks.words else None, byte_fallback=marks.words))
    if marks.words:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]  # pyright: ignore[reportArgumentType]
        )
        alphabet = [*map(chr, range(32, 127)), "▁", "\n", "\t"]
        first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
    trainer: Any = trainers.BpeTrainer(
        vocab_size=len(first) + 400, initial_alphabet=alphabet, special_tokens=first, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks.special])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks.text_marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=marks.eos,
        bos_token=marks.bos,
        chat_template=marks.template,
        clean_up_tokenization_spaces=False,
    )


@cache
def make_template(family: str, **template_kwargs: Any) -> ChatTemplate:
    """A template of a family; the same object for the same arguments, since looking at one takes a while."""
    tokenizer = Tokenizer(make_tokenizer(family), template_kwargs=template_kwargs)
    return ChatTemplate(tokenizer, end_ids=tokenizer.token_ids_of(FAMILIES[family].end))
