"""What the scheduler side tells the workers about a job's place in the arena (pickled with the step's metadata)."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec

from kvpool_core import wire
from kvpool_vllm.arena_view import Placement


@dataclass(frozen=True, slots=True)
class LoadSpec(LoadStoreSpec):
    """Leased slots, in the order of the blocks to fill; valid until `lease_until_ns` (CLOCK_MONOTONIC)."""

    placements: list[Placement]
    lease_until_ns: int


@dataclass(frozen=True, slots=True)
class StoreSpec(LoadStoreSpec):
    """Names of the blocks to store, in the order of the blocks to read; the worker reserves slots for them."""

    domain: bytes
    private: bool
    keys: list[wire.StoreKey]
