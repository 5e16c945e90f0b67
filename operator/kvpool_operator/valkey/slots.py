"""Sets of hash slots as bit masks: bit s is slot s.

Pure. Invariant: a mask has no bit at or above 16384. Masks make unions, differences and counts of 16384 slots cheap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SLOTS = 16384
ALL = (1 << SLOTS) - 1
Ranges = tuple[tuple[int, int], ...]
"""(first, last) of each run, ascending; what Valkey's commands take."""
_RUN = re.compile("1+")


def mask_of(ranges: Iterable[tuple[int, int]]) -> int:
    """The mask of (first, last) ranges."""
    mask = 0
    for first, last in ranges:
        mask |= ((1 << (last - first + 1)) - 1) << first
    return mask


def ranges_of(mask: int) -> Ranges:
    """The runs of a mask, ascending."""
    return tuple((run.start(), run.end() - 1) for run in _RUN.finditer(f"{mask:b}"[::-1]))


def lowest(mask: int, count: int) -> int:
    """The `count` lowest slots of a mask; all of it when it has fewer."""
    if count <= 0 or count >= mask.bit_count():
        return mask if count > 0 else 0
    taken = 0
    for first, last in ranges_of(mask):
        if count <= 0:
            break
        last = min(last, first + count - 1)
        taken |= mask_of([(first, last)])
        count -= last - first + 1
    return taken


def describe(mask: int) -> str:
    """For people: the number of slots and, when few, their ranges."""
    ranges = ranges_of(mask)
    shown = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges[:3])
    more = ", ..." if len(ranges) > 3 else ""
    return f"{mask.bit_count()} slots ({shown}{more})" if ranges else "no slots"
