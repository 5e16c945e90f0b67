"""How a request's blocks are named to the agent, group by group.

The agent looks for the longest prefix that every group can serve, and leases exactly that. vLLM's lookup then drops the last
block of a draft model's group (EAGLE, MTP: a later token may rewrite it), so the prefix ends one draft block before what that
group needs, while the windows of the others end where the prefix does. The agent knows of no drafts: it is told the same by
moving the other groups back by a draft block, with `lead_blocks` blocks in front that need not be looked up.

Pure. Invariants: a message has no more keys than the protocol allows; with the verdict on a Prefetch vLLM finds what it would
find if every block in the tiers were a hit, up to the end of what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool_core.block_hash import HASH_BYTES
from kvpool_core.errors import UnsupportedModelError
from kvpool_core.wire import PREFETCH_KEYS_MAX, RESERVE_KEYS_MAX, GroupKeys, GroupVerdict

LEAD = bytes(HASH_BYTES)
"""In place of a hash, for what counts as held by the engine: no block has it."""


@dataclass(frozen=True, slots=True)
class GroupKeying:
    """How one offloaded group cuts a request into blocks.

    hashes_per_block: block hashes that a block spans. window_blocks: as the workers register it, 0 = full attention.
    """

    group: int
    tokens_per_block: int
    hashes_per_block: int
    window_blocks: int
    is_draft: bool = False
    lead_blocks: int = 0

    def hashes(self, block_hashes: Sequence[bytes], tokens: int) -> list[bytes]:
        """The hash of each whole block within the first `tokens`: that of its last hash boundary."""
        end = tokens // self.tokens_per_block * self.hashes_per_block
        return list(block_hashes[self.hashes_per_block - 1 : end : self.hashes_per_block])

    def key(self, block_hash: bytes) -> bytes:
        """vLLM's OffloadKey."""
        return block_hash + self.group.to_bytes(4, "big")


def with_leads(keyings: Sequence[GroupKeying]) -> list[GroupKeying]:
    """The groups, those without a draft model's layers moved back by what vLLM drops; UnsupportedModelError where no number of
    their blocks is that much."""
    dropped = max((keying.tokens_per_block for keying in keyings if keying.is_draft), default=0)
    return [_moved(keying, dropped) for keying in keyings]


def _moved(keying: GroupKeying, dropped_tokens: int) -> GroupKeying:
    if dropped_tokens % keying.tokens_per_block or (keying.is_draft and keying.tokens_per_block != dropped_tokens):
        raise UnsupportedModelError(
            f"blocks of KV-cache group {keying.group} have {keying.tokens_per_block} tokens, those of the draft model "
            f"{dropped_tokens}: not supported, serve without speculative decoding or with one block size"
        )
    lead_blocks = 0 if keying.is_draft else dropped_tokens // keying.tokens_per_block
    return GroupKeying(
        keying.group,
        keying.tokens_per_block,
        keying.hashes_per_block,
        keying.window_blocks,
        keying.is_draft,
        lead_blocks,
    )


def registered_window_blocks(window_blocks: int, *, is_draft: bool) -> int:
    """Blocks that a group needs at the end of the agent's prefix: a draft's window has the dropped block behind it."""
    return window_blocks + 1 if window_blocks and is_draft else window_blocks


def asked_tokens(keyings: Sequence[GroupKeying], limit: int = PREFETCH_KEYS_MAX) -> int:
    """Leading tokens of a request that one Prefetch can ask for; what lies behind is computed."""
    keys_per_token = sum(1 / keying.tokens_per_block for keying in keyings)
    return int((limit - sum(keying.lead_blocks for keying in keyings)) / keys_per_token)


def group_keys(
    keyings: Sequence[GroupKeying],
    block_hashes: Sequence[bytes],
    *,
    tokens: int,
    local_tokens: int,
    windows_are_local: bool,
) -> list[GroupKeys]:
    """What a Prefetch says of a request: of its first `tokens`, of which the engine's own cache holds `local_tokens`.

    windows_are_local: vLLM has said so of all groups; else it is guessed from groups of full attention, and of windows nothing is
    known to be there.
    """
    asked = []
    for keying in keyings:
        hashes = keying.hashes(block_hashes, tokens)
        is_local = windows_are_local or not keying.window_blocks
        local = min(local_tokens // keying.tokens_per_block, len(hashes)) if is_local else 0
        asked.append(GroupKeys(keying.group, [LEAD] * keying.lead_blocks + hashes, keying.lead_blocks + local))
    return asked


def index_of(keyings: Sequence[GroupKeying], groups: Sequence[GroupKeys]) -> dict[bytes, tuple[int, int]]:
    """Where a verdict on these groups speaks of a key: (position of its group, position in the group)."""
    return {
        keying.key(keys.hashes[position]): (number, position)
        for number, (keying, keys) in enumerate(zip(keyings, groups, strict=True))
        for position in range(keying.lead_blocks, len(keys.hashes))
    }


def is_answer_to(verdicts: Sequence[GroupVerdict], sizes: Sequence[int]) -> bool:
    """Whether a verdict speaks of each of so many keys in each group: an agent that errs costs its answer, not the connector."""
    rows = [(len(v.states), len(v.tiers), len(v.slots), len(v.generations)) for v in verdicts]
    return rows == [(size,) * 4 for size in sizes]


def leading_keys(
    keys: Sequence[bytes], position_of: Callable[[bytes], int], limit: int = RESERVE_KEYS_MAX
) -> list[bytes]:
    """The keys of one store job, in their order; of too many those of the shortest prefix, in all groups alike."""
    if len(keys) <= limit:
        return list(keys)
    first_left_out = sorted(map(position_of, keys))[limit]
    return [key for key in keys if position_of(key) < first_left_out]
