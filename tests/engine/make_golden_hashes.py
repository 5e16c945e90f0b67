"""Golden block hashes, made by the real vLLM.

Run in the engine's venv: `python tests/engine/make_golden_hashes.py tests/unit/golden/block_hashes.json`. Every case is
hashed by vLLM's own `init_none_hash`, `generate_block_hash_extra_keys` and `hash_block_tokens` with `sha256_cbor`.
Invariant: the output depends on vLLM's version only.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOKENS_SEED = 20240229

Case = dict[str, Any]


def token_lists() -> dict[str, list[int]]:
    """Prompts: shorter than a block, block multiples and not, small ids, ids at CBOR's size edges, a long one."""
    source = random.Random(TOKENS_SEED)
    return {
        "empty": [],
        "under-a-block": list(range(15)),
        "one-block-of-16": list(range(16)),
        "edges": [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1] * 8,
        "repeated": [7] * 100,
        "long": [source.randrange(128_256) for _ in range(400)],
    }


def settings() -> list[Case]:
    """Everything that enters a hash besides the tokens. A seed of None is vLLM's own default."""
    cases: list[Case] = [
        {"block_size": size, "seed": seed, "cache_salt": salt, "lora": None}
        for size in (16, 32)
        for seed in (None, "0", "kvpool")
        for salt in (None, "tenant-a", "größe")
    ]
    lora = ["adapter", "/models/adapter"]
    cases += [{"block_size": 16, "seed": None, "cache_salt": salt, "lora": lora} for salt in (None, "tenant-a")]
    return cases


def hash_with_vllm(tokens: list[int], case: Case) -> list[str]:
    """The hex digests of the full blocks, as vLLM's scheduler computes them."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    os.environ.pop("PYTHONHASHSEED", None)
    if case["seed"] is not None:
        os.environ["PYTHONHASHSEED"] = case["seed"]
    kv_cache_utils.init_none_hash(sha256_cbor)
    lora = case["lora"]
    request = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name=lora[0], lora_path=lora[1]) if lora else None,
        cache_salt=case["cache_salt"],
        prompt_embeds=None,
        mm_features=[],
        block_hashes=[],
        num_tokens=len(tokens),
        all_token_ids=tokens,
    )
    hasher = kv_cache_utils.get_request_block_hasher(case["block_size"], sha256_cbor)
    return [block.hex() for block in hasher(request)]


def make() -> dict[str, Any]:
    """All cases with their hashes, and the version that made them."""
    import vllm

    prompts = token_lists()
    cases = [
        {**case, "tokens": name, "hashes": hash_with_vllm(tokens, case)}
        for case in settings()
        for name, tokens in prompts.items()
    ]
    return {"vllm": vllm.__version__, "algorithm": "sha256_cbor", "tokens": prompts, "cases": cases}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(make(), indent=1, sort_keys=True) + "\n")
