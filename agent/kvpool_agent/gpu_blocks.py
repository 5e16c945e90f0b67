"""Which blocks each engine's own cache holds, counted, since vLLM tells of every physical block.

Pure. Invariant: a block is present while its count is positive; what `apply` and `replace` return are exactly the changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BLOCKS_MAX = 8_000_000
"""Distinct blocks remembered per engine: more than any GPU holds; beyond that new ones are not told of."""

Block = tuple[int, int]
"""(group, short hash)"""


@dataclass(slots=True)
class GpuChanges:
    """What changed: first everything was cleared (if it was), then each of these blocks came (True) or went (False)."""

    cleared: bool = False
    blocks: dict[Block, bool] = field(default_factory=dict)


class GpuBlocks:
    """Counts of one engine."""

    def __init__(self) -> None:
        self._counts: dict[Block, int] = {}

    def present(self) -> Iterable[Block]:
        """Blocks that the engine holds."""
        return self._counts.keys()

    def apply(self, kinds: str, groups: Sequence[int], hashes: Sequence[int]) -> list[GpuChanges]:
        """Events in order, as changes to report one after the other: a clear begins a new portion."""
        portions = [GpuChanges()]
        for kind, group, value in zip(kinds, groups, hashes, strict=True):
            if kind == "c":
                self._counts.clear()
                portions.append(GpuChanges(cleared=True))
            elif kind == "s":
                self._add((group, value), portions[-1])
            else:
                self._subtract((group, value), portions[-1])
        return portions

    def replace(self, groups: Sequence[int], hashes: Sequence[int], counts: Sequence[int]) -> GpuChanges:
        """A snapshot: report the difference."""
        former = self._counts
        blocks = list(zip(groups, hashes, strict=True))[:BLOCKS_MAX]
        self._counts = dict(zip(blocks, counts, strict=False))
        changes = {block: False for block in former if block not in self._counts}
        changes.update({block: True for block in self._counts if block not in former})
        return GpuChanges(blocks=changes)

    def _add(self, block: Block, changes: GpuChanges) -> None:
        count = self._counts.get(block, 0)
        if not count:
            if len(self._counts) >= BLOCKS_MAX:
                return
            changes.blocks[block] = True
        self._counts[block] = count + 1

    def _subtract(self, block: Block, changes: GpuChanges) -> None:
        count = self._counts.get(block, 0)
        if count > 1:
            self._counts[block] = count - 1
        elif count == 1:
            del self._counts[block]
            changes.blocks[block] = False
