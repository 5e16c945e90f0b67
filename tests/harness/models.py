"""Makes the random models that tests and the demo serve; runs in the engine's venv: `python models.py FOLDER [NAME ...]`.

Invariant: equal names give equal weights, bit for bit, for equal versions of torch and transformers (seeded, one thread). The
tokenizer has one token per character and gives every text back that it made, so an answer put into a prompt keeps its tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVING_DTYPE = "float32"
"""What engines in tests are started with: without AVX-512, vLLM's bfloat16 falls back to a matmul that is tens of times slower."""
LONGEST_PROMPT = 8192
WEIGHT_SPREAD = 0.06
"""Standard deviation of the weights. With the usual 0.02 an untrained model repeats one token, and hides a wrong block."""
UNKNOWN, END, BEGIN = "<unk>", "<eos>", "<bos>"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Model:
    """One model to make: `build` gives an untrained transformers model of that vocabulary."""

    seed: int
    vocabulary: int
    build: Callable[[int], Any]


def tiny_llama(vocabulary: int) -> Any:
    """One layer, the model of most tests: its KV comes before the first sum over tensor-parallel ranks, so it is bit for bit
    the same at any TP size. Models of several layers are the hybrid and the demo's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        **_settings(),
    )
    return LlamaForCausalLM(config)


def tiny_hybrid(vocabulary: int) -> Any:
    """Gemma 3 with 4 sliding-window layers (64 tokens) and 2 full ones: several KV-cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **_settings(),
    )
    return Gemma3ForCausalLM(config)


def demo_60m(vocabulary: int) -> Any:
    """61 million parameters, 42 of them in the vocabulary: 3,000 cold tokens take 2 s with AVX-512 to 5 s without, on one core."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        **_settings(),
    )
    return LlamaForCausalLM(config)


MODELS = {
    "tiny-llama": Model(seed=1, vocabulary=512, build=tiny_llama),
    # The same shapes with other weights: blocks must never be shared.
    "tiny-llama-b": Model(seed=2, vocabulary=512, build=tiny_llama),
    "tiny-hybrid": Model(seed=3, vocabulary=512, build=tiny_hybrid),
    "demo-60m": Model(seed=4, vocabulary=40960, build=demo_60m),
}


def make(name: str, folder: Path) -> None:
    """Write weights, configuration and tokenizer of model `name` into `folder`."""
    import torch

    torch.set_num_threads(1)
    model = MODELS[name]
    torch.manual_seed(model.seed)
    model.build(model.vocabulary).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder, model.vocabulary)
    for path in folder.iterdir():  # safetensors come out 0600, and an engine of another user could not read them
        path.chmod(0o644)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = {_character(token): token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=END,
        bos_token=BEGIN,
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST_PROMPT,
    )
    wrapped.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}, indent=2) + "\n")


def _character(token: int) -> str:
    """ASCII for itself, what follows Latin-1 for the rest: one character a token, each another."""
    special = {0: UNKNOWN, 1: END, 2: BEGIN}
    if token in special:
        return special[token]
    return chr(token) if token in (9, 10) or 32 <= token < 127 else chr(0x100 + token)


def _settings() -> dict[str, Any]:
    """What every model's configuration has."""
    tokens = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 1}
    return {"max_position_embeddings": LONGEST_PROMPT, "initializer_range": WEIGHT_SPREAD, **tokens}


def main(arguments: list[str]) -> None:
    """Make the named models, or all, each in a folder of its name."""
    folder, *names = arguments
    for name in names or MODELS:
        made = Path(folder) / name
        made.mkdir(parents=True, exist_ok=True)
        make(name, made)


if __name__ == "__main__":
    main(sys.argv[1:])
