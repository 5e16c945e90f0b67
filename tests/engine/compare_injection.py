"""What the webhook and the injected folder assume of vLLM, against vLLM itself.

Run in the engine's venv with the injected folder on PYTHONPATH: prints how many command lines were read as vLLM's parser reads
them, then what became of the connector of an encoder-decoder model; ends non-zero where something differs.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

from transformers import Qwen2AudioConfig, WhisperConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpool_operator.webhook.contract import EVENTS_FLAG, HASH_FLAG, TRANSFER_CONFIG, TRANSFER_FLAG
from kvpool_operator.webhook.engine_flags import SHORTEST, Flags
from kvpool_operator.webhook.value_flags import VALUE_FLAGS

SEED = 20261201
COMMAND_LINES = 500
EVENTS = "enable_kv_cache_events"
PIECES = (
    ("--pipeline-parallel-size", "2"),
    ("--pipeline_parallel_size=1",),
    ("-pp", "3"),
    ("-pp=1",),
    ("--pi", "2"),
    ("-n2",),
    ("-n", "1"),
    ("--nnodes=3",),
    ("--nn", "1"),
    ("--enable-prefix-caching",),
    ("--no-enable-prefix-caching",),
    ("--no_enable_prefix_caching",),
    ("--no-enable-pre",),
    (HASH_FLAG, "sha256"),
    ("--prefix_caching-hash_algo=sha256_cbor",),
    ("--prefix-cachi", "sha256"),
    (EVENTS_FLAG, json.dumps({EVENTS: True})),
    (EVENTS_FLAG, "{}"),
    (f"--kv_events_config.{EVENTS}=true",),
    (f"{EVENTS_FLAG}.{EVENTS}", "false"),
    (f"{EVENTS_FLAG}.publisher", "null"),
    ("--headless",),
    ("--headles",),
    ("--port", "9000"),
    ("--por=9001",),
    ("--use-replayssm",),
    ("--no-use-r",),
    ("--seed", "0"),
    ("--tensor-parallel-size", "2"),
    ("-tp", "4"),
    ("--tensor_par=8",),
    ("--enforce-eager",),
    ("--served-model-name", "a", "b"),
)


def by_vllm(parser: Any, tokens: list[str]) -> dict[str, object] | None:
    """What vLLM makes of a command line; None where it refuses it."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = parser.parse_args(list(tokens))
    except (SystemExit, ValueError):
        return None
    events = found.kv_events_config
    return {
        "pipeline": found.pipeline_parallel_size,
        "nodes": found.nnodes,
        "tensor": found.tensor_parallel_size,
        "headless": found.headless,
        "port": found.port,
        "hash": found.prefix_caching_hash_algo,
        "prefix caching": found.enable_prefix_caching,
        "replayssm": bool(found.use_replayssm),
        "events": bool(events) and getattr(events, EVENTS),
    }


def by_webhook(parser: Any, tokens: list[str]) -> dict[str, object]:
    """What the webhook makes of it."""
    flags = Flags(tuple(tokens))
    return {
        "pipeline": flags.number("--pipeline-parallel-size", "-pp", default=1),
        "nodes": flags.number("--nnodes", "-n", default=1),
        "tensor": flags.number("--tensor-parallel-size", "-tp", default=1),
        "headless": flags.has("--headless"),
        "port": flags.number("--port", default=8000),
        "hash": flags.value(HASH_FLAG) or parser.get_default("prefix_caching_hash_algo"),
        "prefix caching": flags.is_on("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "replayssm": flags.is_on("--use-replayssm", "--no-use-replayssm") or False,
        "events": flags.enables(EVENTS_FLAG, EVENTS),
    }


def compare_command_lines(parser: Any) -> int:
    """How many differ."""
    chance, compared, different = random.Random(SEED), 0, 0
    while compared < COMMAND_LINES:
        pieces = [chance.choice(PIECES) for _ in range(chance.randint(1, 6))]
        tokens = ["model", *(token for piece in pieces for token in piece)]
        expected = by_vllm(parser, tokens)
        if expected is None:
            continue
        compared += 1
        found = by_webhook(parser, tokens)
        if found != expected:
            different += 1
            print(tokens, {name: (expected[name], found[name]) for name in expected if expected[name] != found[name]})
    print(f"{compared} command lines, {different} different")
    return different


def compare_abbreviations(parser: Any) -> int:
    """How many abbreviations that vLLM takes for one of the flags would be overlooked."""
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    missed = 0
    for flag, shortest in SHORTEST.items():
        taken = [
            flag[:end] for end in range(3, len(flag)) if [o for o in options if o.startswith(flag[:end])] == [flag]
        ]
        missed += flag not in options or any(not each.startswith(shortest) for each in taken)
    print(f"{len(SHORTEST)} abbreviations, {missed} different")
    return missed


def compare_value_flags(parser: Any) -> int:
    """How many flags are said to take a value that the parser takes without one."""
    alone = {name for name, action in parser._option_string_actions.items() if action.nargs in (0, "?", "*")}
    known = parser._option_string_actions.keys()
    wrong = (VALUE_FLAGS & alone) | (VALUE_FLAGS - known)
    print(f"{len(VALUE_FLAGS)} flags with a value, {len(wrong)} different")
    return len(wrong)


def keeps_connector(folder: Path) -> bool:
    """Whether an encoder-decoder model is given our connector, with which vLLM would not start it."""
    WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ).save_pretrained(folder)
    command = ["--model", str(folder), TRANSFER_FLAG, TRANSFER_CONFIG, "--skip-tokenizer-init", "--dtype", "float32"]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    config = EngineArgs.from_cli_args(parser.parse_args(command)).create_engine_config()
    print(f"encoder-decoder: {config.model_config.is_encoder_decoder}, connector: {config.kv_transfer_config}")
    return config.kv_transfer_config is not None


def accepted_embeddings(folder: Path, *extra: str) -> tuple[bool, bool]:
    """Whether a multimodal engine takes embeddings in place of sounds, and whether it takes them in part."""
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 16}
    Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        text_config={"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 64, **text},
        audio_config=audio,
    ).save_pretrained(folder)
    command = ["--model", str(folder), "--skip-tokenizer-init", "--dtype", "float32", *extra]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    found = EngineArgs.from_cli_args(parser.parse_args(command)).create_engine_config().model_config.multimodal_config
    return found.enable_mm_embeds, found.allow_missing_mm_embeddings


def compare_embeddings(folder: Path) -> int:
    """How many multimodal engines take other inputs with our connector than without."""
    different = 0
    for asked in ((), ("--enable-mm-embeds",)):
        without, with_ours = (
            accepted_embeddings(folder, *asked, *flags) for flags in ((), (TRANSFER_FLAG, TRANSFER_CONFIG))
        )
        different += with_ours != without
    print(f"2 multimodal engines, {different} different")
    return different


if __name__ == "__main__":
    whole = make_arg_parser(FlexibleArgumentParser())
    sys.exit(
        compare_command_lines(whole)
        + compare_abbreviations(whole)
        + compare_value_flags(whole)
        + keeps_connector(Path(sys.argv[1]))
        + compare_embeddings(Path(sys.argv[1]) / "audio")
    )
