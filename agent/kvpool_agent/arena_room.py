"""Whether the node has room for a new arena. Two must never be there at once: its memory is planned for one.

Pure but for reading /proc and /sys. Invariant: no new arena is begun while an engine is known to map a former one, nor
before engines that may map one had the time to connect, nor while the kernel has too little memory to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool_agent.arena_status import Mapper

MARGIN_BYTES = 256 << 20
"""Beside the arena: page tables, the agent itself, and what the node needs to stay well."""
CONNECT_SECONDS = 5.0
"""Engines try again at most every 2 s: two tries and a moment."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when the question is asked.

    needed_bytes: what the kernel must still give. available_bytes: what it can give, None where that cannot be read.
    connect_seconds_left: how long engines that may map a former arena still have to connect.
    """

    mappers: Sequence[Mapper]
    connect_seconds_left: float
    needed_bytes: int
    available_bytes: int | None


def why_pending(situation: Situation) -> str:
    """Why the new arena may not be made yet; "" when it may."""
    if situation.mappers:
        return f"engines to unmap the former arena: {', '.join(map(str, situation.mappers))}"
    if situation.connect_seconds_left > 0:
        return "engines that may map the former arena to connect"
    available = situation.available_bytes
    if available is not None and available < situation.needed_bytes:
        return (
            f"memory: the arena needs {situation.needed_bytes} bytes with its margin, the node has {available} available: "
            "a former arena is still mapped by an engine, or the pool's capacity is too large for this node"
        )
    return ""


def needed_bytes(capacity_bytes: int, huge_page_bytes: int, *, kept_bytes: int) -> int:
    """What the kernel must give. kept_bytes: pages of an arena of another size that the holder frees first."""
    margin = 0 if huge_page_bytes else MARGIN_BYTES
    return max(0, capacity_bytes + margin - kept_bytes)


def read_available_bytes(huge_page_bytes: int, *, root: Path = Path("/")) -> int | None:
    """Memory that the kernel can give in pages of this size (0: ordinary ones); None where it does not say."""
    try:
        if huge_page_bytes:
            folder = root / "sys/kernel/mm/hugepages" / f"hugepages-{huge_page_bytes >> 10}kB"
            free, reserved = (int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
            return (free - reserved) * huge_page_bytes
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


class LastArena:
    """A note in the socket folder of the arena that engines were last handed: it outlives the pod, not the node's boot.

    Without one, no engine of this folder can map any arena, and nobody has to be waited for.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "last-arena"

    def read(self) -> bytes:
        """The arena's id, b"" without a note; a note that cannot be read counts as one of an unknown arena."""
        try:
            return bytes.fromhex(self._path.read_text().strip())
        except FileNotFoundError:
            return b""
        except (OSError, ValueError):
            return b"unknown"

    def write(self, arena_id: bytes) -> None:
        """Note it before the first engine is handed the arena; OSError when the folder cannot be written."""
        draft = self._path.with_suffix(".new")
        draft.write_text(arena_id.hex())
        draft.replace(self._path)
