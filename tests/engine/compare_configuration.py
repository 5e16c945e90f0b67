"""What the domain makes of vLLM's configuration, against vLLM itself. Run in the engine's venv, no engine is started.

Prints the fields of vLLM's configuration classes that nobody decided about, and which of some command lines share a domain.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig
from vllm.config import CacheConfig, LoadConfig, LoRAConfig, ModelConfig, MultiModalConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore

from kvpool_vllm import adapter_loads, fingerprint
from kvpool_vllm.config_fields import DECIDED_OTHERWISE, HASHED, undecided_fields

CLASSES = (ModelConfig, MultiModalConfig, CacheConfig, ParallelConfig, LoadConfig, LoRAConfig)
DTYPE = "bfloat16"  # what quantisation needs
PLAIN: tuple[str, ...] = ()
SHARING = (("--served-model-name", "other"), ("--max-num-seqs", "3"), ("--enforce-eager",), ("--seed", "7"))
APART = (
    ("--quantization", "online", "--quantization-config", '{"linear": "fp8_per_tensor"}'),
    ("--quantization", "online", "--quantization-config", '{"linear": "fp8_per_tensor", "ignore": ["re:.*k_proj.*"]}'),
    ("--model-class-overrides", '{"LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM"}'),
    ("--load-format", "pt"),
)
ADAPTERS = (
    PLAIN,
    ("--enable-lora",),
    ("--enable-lora", "--lora-target-modules", "q_proj"),
)
PROCESSING: tuple[dict[str, Any], ...] = (
    {},
    {"mm_processor_kwargs": {"size": {"longest_edge": 512}}},
    {"mm_processor_kwargs": {"size": {"longest_edge": 1024}}},
    {"limit_per_prompt": {"image": 1}},
    {"video_pruning_rate": 0.5},
)


def configuration(folder: Path, extra: tuple[str, ...]) -> Any:
    """What vLLM makes of a command line."""
    arguments = ["--model", str(folder), "--skip-tokenizer-init", *extra, "--dtype", DTYPE]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(arguments)).create_engine_config()


def part(config: Any) -> str:
    """The scheduler's part of the domain."""
    groups: Any = SimpleNamespace(kv_cache_groups=[])
    return fingerprint.scheduler_part(config, groups, weights=b"w", draft=b"", seed="0").hex()


def adapter_part(config: Any) -> str:
    """The part of an adapter's domain that the engine's settings make."""
    return fingerprint.adapter_settings(config).hex()


def is_load_noted(adapter: Path) -> bool:
    """Whether it is seen that an adapter's files were replaced after vLLM's engine core was told to load it."""
    adapter.mkdir()
    told: list[str] = []
    adapter_loads.watch(EngineCore)
    core: Any = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(add_lora=lambda request: told.append(request.lora_path))
    core.add_lora(LoRARequest("a", 1, str(adapter)))
    (adapter / "adapter_config.json").write_text("{}")
    return told == [str(adapter)] and adapter_loads.state_at_load(told[0]) != adapter_loads.state_of(told[0])


def with_processing(config: Any, settings: dict[str, Any]) -> Any:
    """The same engine for a multimodal model."""
    config.model_config.multimodal_config = MultiModalConfig(**settings)
    return config


def unknown_fields(kind: type) -> set[str]:
    """Names in the tables that vLLM does not have."""
    names = {field.name for field in dataclasses.fields(kind)}
    return set(HASHED[kind.__name__] | DECIDED_OTHERWISE[kind.__name__]) - names


if __name__ == "__main__":
    target = Path(sys.argv[1])
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
    ).save_pretrained(target)
    print(
        json.dumps(
            {
                "undecided": sorted(f"{kind.__name__}.{name}" for kind in CLASSES for name in undecided_fields(kind)),
                "unknown": sorted(f"{kind.__name__}.{name}" for kind in CLASSES for name in unknown_fields(kind)),
                "sharing": [part(configuration(target, extra)) for extra in (PLAIN, *SHARING)],
                "apart": [part(configuration(target, extra)) for extra in (PLAIN, *APART)],
                "adapters": [adapter_part(configuration(target, extra)) for extra in ADAPTERS],
                "noted": is_load_noted(target / "adapter"),
                "processing": [part(with_processing(configuration(target, PLAIN), each)) for each in PROCESSING],
            }
        )
    )
