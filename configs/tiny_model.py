"""`make_tiny_model`: a small Qwen3 with random weights, a byte-level tokenizer and a ChatML template, made on the spot.

Called by the run when `model.path` is `tiny`, and by tests. It writes a complete Hugging Face folder that transformers
and vLLM load without a network. The invariant: the same arguments give the same bytes, and a folder that exists is
complete (it is written beside its place and renamed). It trains nothing: the weights are random.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens: decoding with `skip_special_tokens` drops them."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens that stay in decoded text, because tool and reasoning parsers look for them there."""
VOCAB_SIZE = 512

INITIALIZER_RANGE = 0.1
"""Standard deviation of the random weights. Qwen3's own 0.02 is for wide layers: at a width of 128 it leaves attention so
flat that SFT of 120 steps does not find the hint in a prompt, and learning by reward then has nothing to grow."""

# Digits one by one, words and punctuation with the space before them, white space in runs.
_WORDS = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"

# What the demo and the tests say, many times over, so that it costs few tokens; ordinary English fills the rest.
_FREQUENT = """
Find the exit. Move with w, a, s or d. You are out. No moves left.
The exit is north. The exit is west. The exit is south. The exit is east.
Invalid move. The exit is north.
system
user
assistant
tool
{"name": "add", "arguments": {"a": 12, "b": 30}}
{"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters":
{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
"""
_ENGLISH = """
The old ship left the harbour in the morning and came back with the tide before it was dark.
What is the sum of these numbers? Please think about it step by step, then give the answer.
You are a helpful assistant. You can call a tool when you need it, and you must say when you do not know.
She said that he would be there on time, but they had not seen him for more than an hour.
There are many ways to write a short story, and most of them begin with a person who wants something.
Water runs down the hill into the river, and the river runs through the town to the sea.
We looked for the right word, found another one, and used it where the first should have been.
If you have a question, ask it; if the question has no answer, then say so and go on.
"""


def chat_template(*, strip_thinking: bool = False) -> str:
    """ChatML with hermes tool calls; ignores `enable_thinking`.

    Append-only at turn borders: the rendering of a longer conversation starts with the rendering of a shorter one that
    does not end between two tool messages (those share one user turn). `strip_thinking` breaks that rule on purpose: it
    drops the reasoning of earlier turns, as Qwen3's own template does.
    """
    template = (Path(__file__).parent / "tiny" / "chat_template.jinja").read_text(encoding="utf-8")
    return template.replace("strips = false", "strips = true") if strip_thinking else template


def make_tiny_model(
    folder: Path | str,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 256,
    positions: int = 32768,
    strip_thinking: bool = False,
) -> Path:
    """Write the model to `folder` and return its path; a folder that is complete is left as it is.

    Float32, tied embeddings, 512 tokens; 361,216 parameters at the default sizes. Raises
    FileExistsError when `folder` holds something else.
    """
    target = Path(folder)
    if _is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tokenizer = _make_tokenizer(strip_thinking=strip_thinking, positions=positions)
        tokenizer.save_pretrained(scratch)
        config = Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            max_position_embeddings=positions,
            initializer_range=INITIALIZER_RANGE,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
        _write_weights(scratch, config, seed=seed)
        scratch.chmod(0o755)
        _move(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _move(scratch: Path, target: Path) -> None:
    try:
        os.rename(scratch, target)
    except OSError as error:
        if _is_complete(target):  # another process made it in the meantime
            return
        raise FileExistsError(
            f"the folder of a tiny model must be new, empty or complete, got {target} with other files; "
            "remove it or name another folder"
        ) from error


def _make_tokenizer(*, strip_thinking: bool, positions: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    num_added = len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - num_added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([_FREQUENT] * 20 + [_ENGLISH], trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(strip_thinking=strip_thinking),
    )


def _write_weights(folder: Path, config: Qwen3Config, *, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    generation = GenerationConfig(
        eos_token_id=[config.eos_token_id, config.pad_token_id],
        pad_token_id=config.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
