"""Checks of what engines send, beyond the types that decoding has checked.

Pure. Invariant: a message that passed its check can be acted on without another look at its shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvpool_agent.peer_error import HELLO_INVALID, WRONG_KEYS, PeerError
from kvpool_core.block_hash import HASH_BYTES
from kvpool_core.identity import DOMAIN_BYTES
from kvpool_core.wire import (
    Announce,
    EngineLoad,
    FileDigests,
    GpuEvents,
    GpuSnapshot,
    GroupLayout,
    Hello,
    Prefetch,
    RegisterScheduler,
    RegisterWorker,
    Reserve,
)

KEYS_MAX = 65_536
"""Keys in one Reserve: a step of the engine stores a few hundred."""
PREFETCH_KEYS_MAX = 262_144
"""Keys in one Prefetch over all groups: a million tokens in several groups."""
GROUPS_MAX = 64
RANKS_MAX = 1024
NAME_MAX_CHARACTERS = 512
NAMES_MAX = 64
PART_MAX_BYTES = 64
FILES_MAX = 16_384
U64_MAX = (1 << 64) - 1
U32_MAX = (1 << 32) - 1


def _require(condition: bool, reason: str, message: str) -> None:
    if not condition:
        raise PeerError(reason, message)


def check_hello(hello: Hello) -> None:
    """PeerError when a field is out of its range."""
    names = (hello.engine_id, hello.endpoint, hello.hash_seed, *hello.served_names)
    sized = all(len(name) <= NAME_MAX_CHARACTERS for name in names) and len(hello.served_names) <= NAMES_MAX
    _require(bool(hello.engine_id) and sized, HELLO_INVALID, "engine_id is empty or a name is too long")
    _require(hello.role in ("scheduler", "worker"), HELLO_INVALID, f"role {hello.role!r} is not scheduler or worker")
    ranks = 1 <= hello.world_size <= RANKS_MAX and 0 <= hello.rank < hello.world_size
    _require(ranks, HELLO_INVALID, f"rank {hello.rank} of {hello.world_size} cannot be")
    _require(0 <= hello.dp_rank <= RANKS_MAX, HELLO_INVALID, f"dp_rank {hello.dp_rank} is out of range")
    _require(1 <= hello.block_size <= U32_MAX, HELLO_INVALID, f"block_size {hello.block_size} is out of range")


def check_register_scheduler(message: RegisterScheduler) -> None:
    """PeerError when the part is no digest although the engine claims to be identified."""
    _require(bool(message.problem) or len(message.part) == DOMAIN_BYTES, WRONG_KEYS, "part is not 16 bytes")


def check_register_worker(message: RegisterWorker) -> None:
    """PeerError when parts or layouts cannot be."""
    parts = 0 < len(message.shared_part) <= PART_MAX_BYTES and len(message.rank_part) <= PART_MAX_BYTES
    _require(parts, WRONG_KEYS, "a part is empty or too long")
    groups = [layout.group for layout in message.groups]
    unique = 1 <= len(groups) <= GROUPS_MAX and len(set(groups)) == len(groups)
    _require(unique, WRONG_KEYS, f"{len(groups)} groups, or one given twice")
    _require(all(map(_is_layout, message.groups)), WRONG_KEYS, "a group's layout is out of range")


def _is_layout(layout: GroupLayout) -> bool:
    return (
        0 <= layout.group <= U32_MAX
        and 1 <= layout.payload_bytes <= 1 << 40
        and 1 <= layout.tokens_per_block <= U32_MAX
        and 0 <= layout.window_blocks <= U32_MAX
    )


def check_prefetch(message: Prefetch, layouts: Mapping[int, GroupLayout]) -> None:
    """PeerError when domain, groups or hashes cannot be."""
    _require(len(message.domain) == DOMAIN_BYTES, WRONG_KEYS, f"a domain of {len(message.domain)} bytes")
    _require(0 < len(message.request) <= NAME_MAX_CHARACTERS, WRONG_KEYS, "the request's name is empty or too long")
    rate = message.tokens_per_second
    _require(math.isfinite(rate) and rate >= 0, WRONG_KEYS, f"a rate of {rate} tokens per second")
    keys = sum(len(group.hashes) for group in message.groups)
    _require(keys <= PREFETCH_KEYS_MAX, WRONG_KEYS, f"{keys} keys in one Prefetch, at most {PREFETCH_KEYS_MAX}")
    groups = [group.group for group in message.groups]
    known = len(set(groups)) == len(groups) and all(group in layouts for group in groups)
    _require(known, WRONG_KEYS, f"groups {groups[:GROUPS_MAX]} are not those registered, or given twice")
    for group in message.groups:
        _check_hashes(group.hashes)
        _require(0 <= group.local_blocks <= len(group.hashes), WRONG_KEYS, "local_blocks is out of range")


def check_reserve(message: Reserve, layouts: Mapping[int, GroupLayout]) -> None:
    """PeerError when domain, groups or keys cannot be."""
    _require(len(message.domain) == DOMAIN_BYTES, WRONG_KEYS, f"a domain of {len(message.domain)} bytes")
    _require(0 <= message.job <= U64_MAX, WRONG_KEYS, f"job {message.job} is out of range")
    _require(len(message.keys) <= KEYS_MAX, WRONG_KEYS, f"{len(message.keys)} keys in one Reserve, at most {KEYS_MAX}")
    for key in message.keys:
        if key.group not in layouts or len(key.block_hash) != HASH_BYTES or len(key.parent) not in (0, HASH_BYTES):
            raise PeerError(WRONG_KEYS, f"a key of group {key.group} with hashes of the wrong length, or no such group")
        if not 0 <= key.position <= U32_MAX:
            raise PeerError(WRONG_KEYS, f"position {key.position} is out of range")
    distinct = len({(key.group, key.block_hash) for key in message.keys})
    _require(distinct == len(message.keys), WRONG_KEYS, "a key is given twice")


def _check_hashes(hashes: Sequence[bytes]) -> None:
    lengths = set(map(len, hashes))
    _require(lengths <= {HASH_BYTES}, WRONG_KEYS, f"hashes of {sorted(lengths)[:4]} bytes, not {HASH_BYTES}")


def check_announce(message: Announce) -> None:
    """PeerError when the lists do not belong together."""
    lengths = {len(message.requests), len(message.slots), len(message.generations)}
    _require(len(lengths) == 1 and max(lengths) <= PREFETCH_KEYS_MAX, WRONG_KEYS, "lists of different lengths")


def check_gpu(message: GpuEvents | GpuSnapshot) -> None:
    """PeerError when the lists do not belong together or a hash is no 8-byte number."""
    third = message.kinds if isinstance(message, GpuEvents) else message.counts
    same = len(message.groups) == len(message.hashes) == len(third)
    _require(same, WRONG_KEYS, "lists of different lengths")
    if isinstance(message, GpuEvents):
        _require(set(message.kinds) <= set("src"), WRONG_KEYS, "a kind of event that is not s, r or c")
    else:
        _require(all(count >= 1 for count in message.counts), WRONG_KEYS, "a block held less than once")
    _require(all(0 <= value <= U64_MAX for value in message.hashes), WRONG_KEYS, "a hash of more than 8 bytes")
    _require(all(0 <= group <= U32_MAX for group in message.groups), WRONG_KEYS, "a group out of range")


def check_engine_load(message: EngineLoad) -> None:
    """PeerError when a count is none."""
    fits = 0 <= message.requests <= U32_MAX and 0 <= message.prompt_tokens <= U32_MAX
    _require(fits, WRONG_KEYS, "a load out of range")


def check_file_digests(message: FileDigests) -> None:
    """PeerError when digests are given for other files than named."""
    fits = len(message.files) <= FILES_MAX and len(message.digests) in (0, len(message.files))
    sized = all(len(digest) <= PART_MAX_BYTES for digest in message.digests)
    sampled = all(len(file.sample) <= PART_MAX_BYTES for file in message.files)
    _require(fits and sized and sampled, WRONG_KEYS, "digests that do not belong to the files, or too many")
