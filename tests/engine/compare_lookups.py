"""vLLM's own lookup with an agent's verdicts, against the same lookup with every stored block a hit.

Run in the engine's venv: prints how many requests were compared, and ends non-zero on a difference. What is stored follows
vLLM's own store masks. Everything is real but the engine: vLLM's lookup, specs and masks, the connector's keys, the agent's plan.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    get_sliding_window_size_in_chunks,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_offload.base import LookupResult

from kvpool_agent.prefetch import ABSENT, LOCAL, RAM, GroupBlocks, make_plan
from kvpool_vllm.group_keying import GroupKeying, group_keys, index_of, registered_window_blocks, with_leads

SEED = 20261130
HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@dataclass(frozen=True)
class Group:
    """A KV-cache group of a made-up model. window: tokens, 0 = full attention, -1 = a recurrent state."""

    block_size: int
    window: int = 0
    is_draft: bool = False
    extra: int = 0

    def spec(self) -> KVCacheSpec:
        """vLLM's description of it."""
        if self.window < 0:
            return MambaSpec(block_size=self.block_size, shapes=((1,),), dtypes=(torch.float32,))
        if self.window:
            return SlidingWindowSpec(
                block_size=self.block_size, sliding_window=self.window, extra_retained_tokens=self.extra, **HEADS
            )
        return FullAttentionSpec(block_size=self.block_size, **HEADS)


MODELS: dict[str, list[Group]] = {
    "dense": [Group(16)],
    "dense, drafted": [Group(16, is_draft=True)],
    "hybrid": [Group(16), Group(16, 32), Group(16, 48)],
    "hybrid, window no multiple": [Group(16), Group(16, 40)],
    "hybrid, full layers drafted": [Group(16, is_draft=True), Group(16, 32)],
    "hybrid, draft apart": [Group(16), Group(16, 32), Group(16, is_draft=True)],
    "hybrid, windows drafted": [Group(16), Group(16, 32), Group(16, 32, is_draft=True)],
    "hybrid, windows drafted by several modules": [Group(16), Group(16, 32, extra=2), Group(16, 32, True, extra=2)],
    "windows only, drafted": [Group(16, 32), Group(16, 48, is_draft=True)],
    "recurrent": [Group(16), Group(16, -1)],
    "recurrent, drafted": [Group(16, is_draft=True), Group(16, -1)],
    "large full blocks": [Group(64), Group(16, 32)],
    "large full blocks, drafted": [Group(64, is_draft=True), Group(16, 32)],
}


def key_of(group: int, block: int, size: int) -> bytes:
    """The hash of a chain's block is that of its last token."""
    return ((block + 1) * size).to_bytes(32, "big")


def configs_of(groups: list[Group]) -> tuple[GroupOffloadConfig, ...]:
    """As `SchedulerOffloadConfig.from_spec` makes them."""
    return tuple(
        GroupOffloadConfig(
            group_idx=number,
            tokens_per_block=group.block_size,
            tokens_per_chunk=group.block_size,
            hashes_per_chunk=group.block_size // 16,
            kv_event_group_spec=None,  # events are off
            sliding_window_size_in_chunks=get_sliding_window_size_in_chunks(group.spec(), group.block_size),
            kv_cache_spec=group.spec(),
            manager_cls=KVCacheSpecRegistry.get_manager_class(group.spec()),
            is_eagle_group=group.is_draft,
        )
        for number, group in enumerate(groups)
    )


class Lookups(OffloadingConnectorScheduler):  # type: ignore[misc]
    """vLLM's scheduler side, as far as lookups and store masks need it."""

    def __init__(self, groups: list[Group], retention: int | None) -> None:
        configs = configs_of(groups)
        full = [i for i, config in enumerate(configs) if config.sliding_window_size_in_chunks is None]
        windowed = [i for i in range(len(configs)) if i not in full]
        windowed.sort(key=lambda i: configs[i].sliding_window_size_in_chunks or 0, reverse=True)
        sizes = {configs[i].tokens_per_chunk for i in full} or {max(c.tokens_per_chunk for c in configs)}
        self.config: Any = SimpleNamespace(
            kv_group_configs=configs,
            blocks_per_chunk=1,
            alignment_tokens=next(iter(sizes)) if len(sizes) == 1 else None,
            retention_interval=retention,
            dcp_world_size=1,
        )
        self._full_attention_groups = tuple(full)
        self._sliding_window_groups = tuple(windowed)
        self._lookup_groups = (*full, *windowed)
        self._mamba_align_size = None
        self._chunks_being_loaded = None
        self._events_tracker: Any = SimpleNamespace(record_lookup=lambda *_: None)

    def matched(self, request: SimpleNamespace, hits: set[tuple[int, bytes]]) -> int:
        """Tokens that vLLM would load when exactly these blocks are hits."""
        self.manager: Any = SimpleNamespace(
            lookup=lambda key, _context: LookupResult.HIT if key in hits else LookupResult.MISS
        )
        return self._lookup_complete_chunks(request) or 0

    def stored_by(self, prompt_tokens: int, total_tokens: int) -> set[tuple[int, bytes]]:
        """What a former request with this chain's first tokens has stored."""
        stored = set()
        for number, config in enumerate(self.config.kv_group_configs):
            size = config.tokens_per_chunk
            blocks = total_tokens // size
            mask = self._reachable_store_block_mask(config, 0, blocks, prompt_tokens // size, (prompt_tokens - 1,))
            stored |= {(number, key_of(number, block, size)) for block in range(blocks) if mask is None or mask[block]}
        return stored


def keyings_of(groups: list[Group]) -> list[GroupKeying]:
    """As the connector makes them."""
    return with_leads(
        [
            GroupKeying(
                number,
                config.tokens_per_chunk,
                config.hashes_per_chunk,
                registered_window_blocks(config.sliding_window_size_in_chunks or 0, is_draft=config.is_eagle_group),
                config.is_eagle_group,
            )
            for number, config in enumerate(configs_of(groups))
        ]
    )


def answered(keyings: list[GroupKeying], total: int, local: int, stored: set[tuple[int, bytes]]) -> set[Any]:
    """The blocks that an agent which has these stored calls hits."""
    hashes = [(16 * (i + 1)).to_bytes(32, "big") for i in range(total // 16)]
    asked = group_keys(keyings, hashes, tokens=total, local_tokens=local, windows_are_local=True)
    blocks = []
    for keying, keys in zip(keyings, asked, strict=True):
        held = bytes(
            LOCAL if i < keys.local_blocks else RAM if (keys.group, block_hash) in stored else ABSENT
            for i, block_hash in enumerate(keys.hashes)
        )
        blocks.append(GroupBlocks(keying.tokens_per_block, keying.window_blocks, 1, keys.local_blocks, held))
    plan = make_plan(blocks)
    return {
        (keyings[number].group, bytes(key[:32]))
        for key, (number, position) in index_of(keyings, asked).items()
        if position in plan.needed[number]
    }


def compare(name: str, chance: random.Random) -> tuple[str, int]:
    """One request; what differs, and how much was found."""
    groups = MODELS[name]
    retention = chance.choice([None, 0])
    lookups, keyings = Lookups(groups, retention), keyings_of(groups)
    total = chance.randrange(1, 640)
    stored: set[Any] = set()
    for _ in range(chance.randrange(1, 4)):
        prompt = chance.randrange(1, 640)
        stored |= lookups.stored_by(prompt, prompt + chance.choice([0, 1, 20, 90]))
    stored = {key for key in stored if chance.random() > chance.choice([0, 0, 0.02, 0.2])}
    largest = max(group.block_size for group in groups)
    local = chance.choice([0, 0, chance.randrange(0, total)]) // largest * largest
    request = SimpleNamespace(
        num_locally_computed_tokens=local,
        max_load_tokens=None,
        req=SimpleNamespace(num_tokens=total, request_id="r"),
        req_context=None,
        group_states=[
            SimpleNamespace(
                offload_keys=[
                    (number, key_of(number, block, group.block_size)) for block in range(total // group.block_size)
                ]
            )
            for number, group in enumerate(groups)
        ],
    )
    best = lookups.matched(request, stored)
    found = lookups.matched(request, answered(keyings, total, local, stored))
    if (local + best) % largest:  # inside a block of another group: an agent knows whole blocks only
        best = found
    text = f"{name}: {total} tokens, {local} local, retention {retention}: vLLM would load {best}, loads {found}"
    return (text if found != best else ""), found


def main() -> int:
    """Compare many."""
    chance = random.Random(SEED)
    status = 0
    for name in MODELS:
        results = [compare(name, chance) for _ in range(1000)]
        different = [text for text, _found in results if text]
        found = sum(found > 0 for _text, found in results)
        print(f"{name}: {len(results)} requests, {found} with a hit, {len(different)} different")
        for text in different[:3]:
            print(f"  {text}")
        status |= bool(different) or not found
    return status


if __name__ == "__main__":
    sys.exit(main())
