"""How much of a request's prefix can be loaded, and which blocks that takes.

Pure. Invariant: every block that a plan needs exists in some tier, and a load of exactly the needed blocks makes the
prefix up to the boundary complete in every group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Where a block lies, one byte each. ABSENT is 0, so that `bytes.find(0)` finds the end of a prefix.
ABSENT = 0
LOCAL = 1
"""On the engine's GPU: neither looked up nor leased."""
RAM = 2
UNVERIFIED = 3
"""In the arena since before a take-over, its checksum not verified yet."""
FETCHING = 4
"""On its way from Valkey into the arena."""
VALKEY = 5
"""In Valkey, as far as we know."""
UNKNOWN = 6
"""Perhaps in Valkey: not asked yet."""

_REMOTE = bytes([FETCHING, VALKEY, UNKNOWN])
RAM_ONLY = bytes.maketrans(_REMOTE, bytes([ABSENT]) * len(_REMOTE))
"""For `bytes.translate`: what remains of a group's blocks without Valkey."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of a request in one group, in order from its first.

    window_blocks: blocks needed at the end of the prefix, 0 = all of it (full attention).
    """

    tokens_per_block: int
    window_blocks: int
    payload_bytes: int
    local_blocks: int
    presence: bytes

    def without_valkey(self) -> GroupBlocks:
        """The same, as if Valkey held nothing."""
        return GroupBlocks(
            self.tokens_per_block,
            self.window_blocks,
            self.payload_bytes,
            self.local_blocks,
            self.presence.translate(RAM_ONLY),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """`boundary_tokens`: end of the usable prefix; `needed`: per group the range of block numbers to load."""

    boundary_tokens: int
    needed: tuple[range, ...]


def make_plan(groups: Sequence[GroupBlocks], *, limit_tokens: int | None = None) -> Plan:
    """The longest usable prefix, of at most `limit_tokens`, and what it takes."""
    boundary = usable_boundary(groups, limit_tokens)
    return Plan(boundary, tuple(_needed(group, boundary) for group in groups))


def usable_boundary(groups: Sequence[GroupBlocks], limit_tokens: int | None = None) -> int:
    """The largest number of leading tokens for which every group has what it needs.

    Each group lowers the boundary to one it can serve, until none does: full attention to the end of its existing
    prefix, a windowed group to the last block before which its whole window exists.
    """
    if not groups:
        return 0
    boundary = min(_upper_bound(group) for group in groups)
    if limit_tokens is not None:
        boundary = min(boundary, limit_tokens)
    while True:
        lowered = boundary
        for group in groups:
            lowered = _lower(group, lowered)
        if lowered == boundary:
            return boundary
        boundary = lowered


def _upper_bound(group: GroupBlocks) -> int:
    """No boundary lies beyond this, whatever the other groups have."""
    blocks = len(group.presence)
    if not group.window_blocks:
        first_absent = group.presence.find(ABSENT)
        blocks = blocks if first_absent < 0 else first_absent
    return blocks * group.tokens_per_block


def _lower(group: GroupBlocks, boundary: int) -> int:
    end = boundary // group.tokens_per_block
    while group.window_blocks and end:
        absent = group.presence.rfind(ABSENT, max(0, end - group.window_blocks), end)
        if absent < 0:
            break
        end = absent
    return end * group.tokens_per_block


def _needed(group: GroupBlocks, boundary: int) -> range:
    end = boundary // group.tokens_per_block
    start = max(0, end - group.window_blocks) if group.window_blocks else 0
    return range(max(start, group.local_blocks), max(end, group.local_blocks))


def limit_for_bytes(groups: Sequence[GroupBlocks], cost: Callable[[int, int], int], allowance_bytes: int) -> int | None:
    """The boundary (tokens) up to which the needed blocks' costs stay within the allowance; None = no limit needed.

    cost(group number, block number) is what a block counts against the allowance. Costs of windowed groups count in full
    length, as their window lies wherever the boundary falls.
    """
    sums = [_prefix_sums(number, group, cost) for number, group in enumerate(groups)]
    boundary = min((len(group.presence) * group.tokens_per_block for group in groups), default=0)
    if _cost_at(groups, sums, boundary) <= allowance_bytes:
        return None
    low, high = 0, boundary
    while low < high:
        middle = (low + high + 1) // 2
        if _cost_at(groups, sums, middle) <= allowance_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _prefix_sums(number: int, group: GroupBlocks, cost: Callable[[int, int], int]) -> list[int]:
    sums = [0]
    for block in range(len(group.presence)):
        sums.append(sums[-1] + (cost(number, block) if block >= group.local_blocks else 0))
    return sums


def _cost_at(groups: Sequence[GroupBlocks], sums: Sequence[Sequence[int]], boundary: int) -> int:
    total = 0
    for group, costs in zip(groups, sums, strict=True):
        end = boundary // group.tokens_per_block
        if group.window_blocks:
            total += min(end, group.window_blocks) * group.payload_bytes
        else:
            total += costs[end]
    return total
