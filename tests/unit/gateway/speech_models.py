"""Tokenizers of models that write calls and reasoning: one token for each byte, and one for each mark."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvmesh.grammar.vocabulary import Vocabulary
from kvmesh.loading.tokenizer import TokenizerBundle
from services.gateway.tokenizers import ModelTokenizer, _byte_table

EOS = "<|im_end|>"
END_OF_SEQUENCE = 256

HERMES_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'assistant') %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
# Begins to think for the model, unless it is told not to.
THINK_TEMPLATE = (
    HERMES_TEMPLATE[: HERMES_TEMPLATE.rindex("{%- if add_generation_prompt")]
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}"
    "{% else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
MISTRAL_TEMPLATE = """
{{- bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS][' }}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls must have length 9') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else '' }}{% endfor %}{{ ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}{{ '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"""  # noqa: E501
MISTRAL_ARGS_TEMPLATE = MISTRAL_TEMPLATE.replace("[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]")
LLAMA_TEMPLATE = """
{{- bos_token }}{% if tools %}{{ 'Respond with {"name": function name, "parameters": dictionary of argument name and its value}' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{% else %}{{ message['content'] | trim }}{% endif %}
{{- '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""  # noqa: E501
DEEPSEEK_TEMPLATE = """
{%- for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + '<｜tool▁call▁begin｜>' }}{% endif %}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""  # noqa: E501
TEMPLATES = {
    "hermes": HERMES_TEMPLATE,
    "llama": LLAMA_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "mistral-args": MISTRAL_ARGS_TEMPLATE,
    "deepseek": DEEPSEEK_TEMPLATE,
}

# Which of them are special differs between models.
_SPECIAL = (EOS, "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
            "<|python_tag|>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")  # fmt: skip
_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def build(template: str | None, *, marks: bool = True) -> ModelTokenizer:
    """A model of that template. `marks`: those of calls and reasoning are tokens; else they are spelled in bytes."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_table(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = _SPECIAL if marks else _SPECIAL[:4]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if marks:
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _PLAIN])
    size = tokenizer.get_vocab_size()
    return ModelTokenizer(TokenizerBundle(tokenizer, template, frozenset({END_OF_SEQUENCE}), None, False, size, "m"))


@cache
def model(name: str, *, marks: bool = True) -> ModelTokenizer:
    """The model of a format of calls; "think": one that reasons first; "plain": one that knows nothing of tools."""
    if name == "plain":
        from kvmesh.loading.tokenizer import CHATML_TEMPLATE

        return build(CHATML_TEMPLATE, marks=False)
    return build(THINK_TEMPLATE if name == "think" else TEMPLATES[name], marks=marks)


@cache
def vocabulary(name: str, *, marks: bool = True) -> Vocabulary:
    """The same model's tokens as grammars see them."""
    made = model(name, marks=marks)
    return Vocabulary(made._tokenizer.to_str(), made.vocab_size, made.bundle.eos_token_ids)
