"""Chat templates of public families in their form: the marks, what stands between turns, what is written from the whole history.

Written from memory of their structure, shortened; tools and dates that do not change it are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = "0here0"
"""Stands for an answer, in renderings."""


class Refused(Exception):
    """A template refuses messages."""


def _raise(text: str) -> None:
    raise Refused(text)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.globals["raise_exception"] = _raise
_ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Family:
    """`marks`: control tokens; `stop`: what ends an answer of the model; `continued`: an ordinary answer is continued with a
    tail."""

    template: str
    marks: tuple[str, ...]
    stop: str
    continued: bool = True
    calls: bool = False
    """It writes tool calls and their results."""

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _ENVIRONMENT.from_string(self.template)

    def render(self, messages: Sequence[Any], **kwargs: Any) -> str:
        """What the model is shown. Arguments of calls are objects, as vLLM hands them to templates."""
        shown = [
            {**each, "tool_calls": [_with_object(call) for call in each.get("tool_calls") or ()]} for each in messages
        ]
        return self._compiled.render(messages=shown, **{"add_generation_prompt": True, **kwargs})

    def behind(self, messages: Sequence[Any], k: int, *, stop: str) -> str:
        """What it writes behind answer `k`, which was sampled up to `stop` ("": it was cut): nothing lost, nothing twice. Raises
        ValueError where it writes what precedes that answer in another way than alone."""
        word = f"{HERE}{k}."
        shown = [_hidden(message, at) if at <= k else message for at, message in enumerate(messages)]
        before, _, after = self.render(shown).partition(word)
        if not before.startswith(self.render(shown[:k], add_generation_prompt=False)):
            raise ValueError("the template writes the history in another way")
        alone = self.render(shown[: k + 1], add_generation_prompt=False).partition(word)[2]
        plain = [*shown[:k], {"role": "assistant", "content": word}]
        closing = self.render(plain, add_generation_prompt=False).partition(word)[2]
        if messages[k].get("tool_calls"):
            if not alone.endswith(closing):  # calls have an end of their own
                if not stop or stop not in alone or not after.startswith(alone):
                    raise ValueError("the template ends calls in another way than words, and than the model did")
                return after[alone.rindex(stop) + len(stop) :]
            after = after.removeprefix(alone.removesuffix(closing))  # the end of a call is the model's own
        closing = closing if after.startswith(closing) else ""
        upto = after.find(stop) + len(stop) if stop and stop in after else 0
        if stop and (upto <= len(closing) or (not closing and upto == len(stop))):
            after = after[upto:]  # what was sampled is not written again
        return after


def _hidden(message: Any, at: int) -> Any:
    """An answer whose words, and arguments, give way to a word."""
    if message["role"] != "assistant":
        return message
    calls = message.get("tool_calls") or []
    arguments = json.dumps({"a": f"{HERE}{at}."})
    return {
        **message,
        "content": "" if calls else f"{HERE}{at}.",
        "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls],
    }


def _with_object(call: Any) -> Any:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}


def family(template: str, marks: str, *, stop: str = "", continued: bool = True, calls: bool = False) -> Family:
    """`marks`: the control tokens, the first of which ends an answer, unless `stop` does."""
    names = (*marks.split(),)
    return Family(template, names, stop or names[0], continued, calls)


def turns(
    user: str, answer: str, marks: str, *, opens: str = "", system: str = "", begins: str = "", **more: Any
) -> Family:
    """A template that writes one message after another; `{}` is its text. `opens`: the next answer, by default what precedes it in
    `answer`."""

    def written(form: str) -> str:
        before, _, after = form.partition("{}")
        return "{{ " + f"{before!r} + message.content + {after!r}" + " }}"

    text = (
        "{{ " + repr(begins) + " }}{% for message in messages %}{% if message.role == 'system' %}" + written(system or user)
        + "{% elif message.role == 'assistant' %}" + written(answer) + "{% else %}" + written(user)
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ " + repr(opens or answer.partition("{}")[0])
        + " }}{% endif %}"
    )  # fmt: skip
    return family(text, marks, **more)


def alike(
    form: str, marks: str, *, user: str = "user", answer: str = "assistant", system_role: str = "", **more: Any
) -> Family:
    """As `turns`, where the messages of all roles have one form, in which `@` is the role."""
    if system_role:
        more["system"] = form.replace("@", system_role)
    return turns(form.replace("@", user), form.replace("@", answer), marks, **more)


_IM = "<|im_end|> <|im_start|>"
_L3 = "<|eot_id|> <|start_header_id|> <|end_header_id|> <|begin_of_text|> <|eom_id|> <|end_of_text|>"
_LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{% if message.role == 'assistant' %}{{ ' ' + message.content | trim + ' </s>' }}"
    "{% else %}{{ '<s>[INST] ' + (first if loop.first else '') + message.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
_MISTRAL_LAST = (  # v3: the system message goes to the last message of the user
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ '<s>' }}{% for message in rest %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + message.content + '[/INST]' }}"
    "{% else %}{{ ' ' + message.content | trim + '</s>' }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ '<bos>' }}{% for message in messages %}{% if message.role == 'system' and refuses %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' + message.content | trim +"
    " '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{% set parts = message.content.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% for call in message.tool_calls %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + opens }}{% endif %}"
)
_DEEPSEEK = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'assistant' %}{{ '<｜Assistant｜>' if messages[loop.index0 - 1].role != 'tool' }}"
    "{{ message.content.split('</think>')[-1] }}"
    "{% for call in message.tool_calls %}{{ '<｜tool▁calls▁begin｜>' if loop.first }}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n' }}"
    "{{ call.function.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}{{ '<｜tool▁calls▁end｜>' if loop.last }}{% endfor %}"
    "{{ '<｜end▁of▁sentence｜>' }}"
    "{% elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}"
    "{% else %}{{ '<｜User｜>' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' + opens }}{% endif %}"
)
_DS = (
    "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> "
    "<｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_GLM = (
    "{{ '[gMASK]<sop>' }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|assistant|>\n' + message.content.split('</think>')[-1] | trim }}"
    "{% for call in message.tool_calls %}{{ '\n<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
    "{% elif message.role == 'tool' %}{{ '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|' + message.role + '|>\n' + message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|assistant|>' + opens }}{% endif %}"
)
_GLM_MARKS = "<|user|> <|assistant|> <|system|> <|observation|> [gMASK] <sop> <|endoftext|> </tool_call> <tool_call>"
_LLAMA31 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{% if message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + message.tool_calls[0].function.name + \'",'
    ' "parameters": \' }}'
    "{{ message.tool_calls[0].function.arguments | tojson }}{{ '}' + (ends or '<|eot_id|>') }}"
    "{% else %}"
    "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' +"
    " message.content | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_MISTRAL7 = (
    "{{ '<s>' }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ message.content }}{% for call in message.tool_calls %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ '</s>' }}{% endif %}{% endfor %}"
)
_M7 = (
    "</s> <s> [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [INST] [/INST] [TOOL_RESULTS] [TOOL_CONTENT] [/TOOL_RESULTS] [TOOL_CALLS] [CALL_ID] "
    "[ARGS]"
)
_ROUNDS = (
    "{% set ns = namespace(number=0) %}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ message.content + '</s>\n\n' }}"
    "{% else %}{% set ns.number = ns.number + 1 %}{{ '[Round ' ~ ns.number ~ ']\n\nQ: ' + message.content + '\n\nA: ' }}"
    "{% endif %}{% endfor %}"
)
_HARMONY = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def _set(template: str, **values: str) -> str:
    return "".join("{% set " + f"{name} = {value!r}" + " %}" for name, value in values.items()) + template


FAMILIES: dict[str, Family] = {
    "chatml": alike("<|im_start|>@\n{}<|im_end|>\n", _IM, system_role="system"),
    "yi": alike("<|im_start|>@\n{}<|im_end|>\n", _IM, system_role="system"),
    "smollm": alike("<|im_start|>@\n{}<|im_end|>\n", _IM, begins="<|im_start|>system\nBe SmolLM.<|im_end|>\n"),
    "qwen2": alike("<|im_start|>@\n{}<|im_end|>\n", _IM + " <|endoftext|>", system_role="system"),
    "qwen3": family(_set(_QWEN3, opens=""), _IM + " <tool_call> </tool_call> <think> </think>", calls=True),
    "qwq": family(_set(_QWEN3, opens="<think>\n"), _IM + " <think> </think>", calls=True),
    "smollm3": family(_set(_QWEN3, opens="<think>\n\n</think>\n"), _IM, calls=True),
    "hermes": family(_set(_QWEN3, opens=""), _IM, calls=True),
    "internlm2": alike("<|im_start|>@\n{}<|im_end|>\n", _IM + " <s> </s>", begins="<s>"),
    "dbrx": alike("\n<|im_start|>@\n{}<|im_end|>", _IM),
    "orca": alike("<|im_start|>@\n{}<|im_end|>\n", _IM + " </s>", stop="</s>"),
    "phi-4": alike("<|im_start|>@<|im_sep|>{}<|im_end|>", _IM + " <|im_sep|>"),
    "phi-3": alike("<|@|>\n{}<|end|>\n", "<|end|> <|user|> <|assistant|> <|endoftext|>"),
    "phi-2": alike("@: {}\n", "<|endoftext|>", user="Instruct", answer="Output", continued=False),
    "llama-2": family(_LLAMA2, "</s> <s>"),
    "llama-3": alike("<|start_header_id|>@<|end_header_id|>\n\n{}<|eot_id|>", _L3, begins="<|begin_of_text|>"),
    "llama-3.1": family(_set(_LLAMA31, ends=""), _L3, calls=True),
    "functionary-3": family(_set(_LLAMA31, ends="<|eom_id|>"), _L3, calls=True),
    "functionary-2": turns(
        "<|from|>user\n<|recipient|>all\n<|content|>{}\n", "<|from|>assistant\n<|recipient|>all\n<|content|>{}<|stop|>\n",
        "<|stop|> <|from|> <|recipient|> <|content|>",
    ),
    "mistral-v1": turns("[INST] {} [/INST]", "{}</s>", "</s> <s>", begins="<s>"),
    "mistral-v3": family(_MISTRAL_LAST, "</s> <s>"),
    "mistral-v7": family(_MISTRAL7, _M7, calls=True),
    "gemma": family(_set(_GEMMA, refuses="yes"), "<end_of_turn> <start_of_turn> <bos> <eos>"),
    "gemma-3": family(_set(_GEMMA, refuses=""), "<end_of_turn> <start_of_turn> <bos> <eos>", stop="<eos>"),
    "zephyr": alike("<|@|>\n{}</s>\n", "</s>"),
    "stablelm": alike("<|@|>\n{}<|endoftext|>\n", "<|endoftext|>"),
    "tulu": turns("<|user|>\n{}\n", "<|assistant|>\n{}</s>\n", "</s>"),
    "tulu-1": alike("<|@|>\n{}\n", "</s>", continued=False),
    "olmo": turns("<|user|>\n{}\n", "<|assistant|>\n{}<|endoftext|>\n", "<|endoftext|>", begins="<|endoftext|>"),
    "vicuna": turns("USER: {} ", "ASSISTANT: {}</s>", "</s>", opens="ASSISTANT:", system="{} "),
    "vicuna-without-end": alike("@: {}\n", "</s>", user="USER", answer="ASSISTANT", opens="ASSISTANT:", continued=False),
    "wizardlm": turns("USER: {} ", "ASSISTANT: {}</s>", "</s> <s>", opens="ASSISTANT:"),
    "alpaca": alike("### @:\n{}\n\n", "</s>", user="Instruction", answer="Response", continued=False),
    "solar": alike("### @:\n{}\n\n", "</s>", user="User", answer="Assistant", continued=False),
    "xgen": alike("### @: {}\n", "<|endoftext|>", user="Human", answer="Assistant", opens="###", continued=False),
    "neural-chat": alike("### @:\n{}\n", "</s>", user="User", answer="Assistant", continued=False),
    "persimmon": alike("@: {}\n\n", "|ENDOFTEXT|", user="human", answer="adept", continued=False),
    "reka": alike("@: {} <sep> ", "<sep>", user="human", answer="assistant", opens="assistant:"),
    "deepseek-coder": turns(
        "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", "<|EOT|> <｜begin▁of▁sentence｜>",
        begins="<｜begin▁of▁sentence｜>", opens="### Response:",
    ),
    "deepseek-coder-text": turns(
        "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", "</s>", opens="### Response:", continued=False,
    ),
    "deepseek-v2": turns("User: {}\n\n", "Assistant: {}<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", opens="Assistant:"),
    "deepseek-v3": family(_set(_DEEPSEEK, opens=""), _DS, calls=True),
    "deepseek-r1": family(_set(_DEEPSEEK, opens="<think>\n"), _DS + " <think> </think>", calls=True),
    "nemotron-mini": alike(
        "<extra_id_1>@\n{}\n", "</s> <extra_id_1> <extra_id_0>", user="User", answer="Assistant",
        system="<extra_id_0>System\n{}\n", continued=False,
    ),
    "command-r": alike(
        "<|START_OF_TURN_TOKEN|><|@|>{}<|END_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>", user="USER_TOKEN",
        answer="CHATBOT_TOKEN",
    ),
    "aya": turns(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|END_RESPONSE|>",
    ),
    "granite": alike(
        "<|start_of_role|>@<|end_of_role|>{}<|end_of_text|>\n", "<|end_of_text|> <|start_of_role|> <|end_of_role|>",
    ),
    "falcon": alike("@: {}\n\n", "<|endoftext|>", user="User", answer="Assistant", opens="Assistant:", continued=False),
    "falcon-3": turns("<|user|>\n{}\n", "<|assistant|>\n{}<|endoftext|>\n", "<|endoftext|> <|user|> <|assistant|>"),
    "exaone": turns(
        "[|user|]{}\n", "[|assistant|]{}[|endofturn|]\n", "[|endofturn|] [|user|] [|assistant|] [|system|]",
        system="[|system|]{}[|endofturn|]\n",
    ),
    "glm-4": family(_set(_GLM, opens=""), _GLM_MARKS, calls=True),
    "glm-4.5": family(_set(_GLM, opens="\n<think>"), _GLM_MARKS + " <think> </think>", calls=True),
    "glm-4-eos": family(_set(_GLM, opens=""), _GLM_MARKS, stop="<|endoftext|>", calls=True),
    "chatglm3": alike(
        "<|@|>\n {}", "<|user|> <|assistant|> <|system|> [gMASK] sop </s>", system_role="system", begins="[gMASK]sop",
        opens="<|assistant|>", stop="</s>",
    ),
    "chatglm2": family(_ROUNDS, "</s>", continued=False),
    "baichuan": alike("<@>{}", "</s> <reserved_106> <reserved_107>", user="reserved_106", answer="reserved_107", system="{}"),
    "minicpm": alike("<@>{}", "</s> <s>", user="用户", answer="AI", continued=False),
    "minicpm-end": turns("<用户>{}", "<AI>{}</s>", "</s> <s>"),
    "openchat": alike(
        "@: {}<|end_of_turn|>", "<|end_of_turn|> <s>", user="GPT4 Correct User", answer="GPT4 Correct Assistant", begins="<s>",
        opens="GPT4 Correct Assistant:",
    ),
    "starling": alike(
        "@: {}<|end_of_turn|>", "<|end_of_turn|> <sep>", user="Code User", answer="Code Assistant", opens="Code Assistant:",
    ),
    "saiga": alike("<s>@\n{}</s>\n", "</s> <s>", user="user", answer="bot", system_role="system"),
    "jamba": alike("<|bom|><|@|> {}<|eom|>", "<|eom|> <|bom|> <|user|> <|assistant|>"),
    "arctic": alike("<|im_start|>@\n{}<|im_end|>\n", _IM, begins="<|im_start|>system\n<|im_end|>\n"),
    "ernie": turns(
        "User: {}\n", "Assistant: {}<|end_of_sentence|>", "<|end_of_sentence|> <|begin_of_sentence|>",
        begins="<|begin_of_sentence|>",
    ),
    "kimi": alike("<|im_@|>@<|im_middle|>{}<|im_end|>", "<|im_end|> <|im_user|> <|im_assistant|> <|im_middle|>"),
    "seed-oss": alike("<seed:bos>@\n{}<seed:eos>", "<seed:eos> <seed:bos>"),
    "hunyuan": turns(
        "<|startoftext|>{}<|extra_0|>", "{}<|eos|>", "<|eos|> <|startoftext|> <|extra_0|>",
        system="<|startoftext|>{}<|extra_4|>",
    ),
    "ling": alike("<role>@</role>{}<|role_end|>", "<|role_end|>", user="HUMAN", answer="ASSISTANT"),
    "gpt-oss": family(_HARMONY, "<|return|> <|end|> <|start|> <|channel|> <|message|>", continued=False),
    "end-in-blank-and-mark": alike("<|im_start|>@\n{} <|im_end|>", _IM),
}  # fmt: skip
