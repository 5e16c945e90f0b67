"""Which bytes of an engine's cache make up a block's canonical payload.

The payload of a block is the canonical pages of its group's layers, in the group's order (vLLM's `CanonicalPageMapping`:
all heads, no parallelism). Invariant: the fragments of all ranks that write tile the payload exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

Pointers: TypeAlias = "npt.NDArray[np.uint64]"
Sizes: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, slots=True)
class Fragments:
    """Copies of one block: absolute addresses on the cache's side, offsets into the payload, bytes; equal lengths."""

    cache: Pointers
    payload: Pointers
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The copies of every block of one KV-cache group, of `payload_bytes` each (all ranks together).

    Per fragment: cache address of block 0, bytes between two blocks there, payload offset, bytes, and the rotation by
    which ranks that hold the same bytes take turns writing them.
    """

    payload_bytes: int
    base: Pointers
    stride: Pointers
    payload: Pointers
    sizes: Sizes
    num_writers: Sizes
    writer_index: Sizes

    def fragments(self, block_id: int, *, storing: bool) -> Fragments:
        """All copies of one cache block; of a store only those that this rank writes."""
        cache = self.base + np.uint64(block_id) * self.stride
        if not storing or bool((self.num_writers == 1).all()):
            return Fragments(cache, self.payload, self.sizes)
        mine = block_id % self.num_writers == self.writer_index
        return Fragments(cache[mine], self.payload[mine], self.sizes[mine])


def build_group_plans(caches: CanonicalKVCaches) -> list[GroupPlan]:
    """One plan per group of data refs; every ref must have a mapping (`fingerprint.worker_parts` has checked it)."""
    return [_build_plan(caches, refs) for refs in caches.group_data_refs]


def _build_plan(caches: CanonicalKVCaches, refs: list[CanonicalKVCacheRef]) -> GroupPlan:
    rows: list[tuple[int, int, int, int, int, int]] = []
    offset = 0
    for ref in refs:
        mapping = ref.mapping
        assert mapping is not None
        tensor = caches.tensors[ref.tensor_idx].tensor
        base, stride = tensor.data_ptr(), tensor.stride(0)
        for run in mapping.runs:
            for i in range(run.num_fragments):
                rows.append(  # noqa: PERF401 three loops deep, a comprehension is no easier to read
                    (
                        base + run.local_offset + i * run.local_stride,
                        stride,
                        offset + run.canonical_offset + i * run.canonical_stride,
                        run.fragment_size,
                        mapping.num_writers,
                        mapping.writer_index,
                    )
                )
        offset += mapping.canonical_page_size_bytes
    columns = list(zip(*rows, strict=True))
    unsigned = [np.array(columns[i], dtype=np.uint64) for i in (0, 1, 2)]
    signed = [np.array(columns[i], dtype=np.int64) for i in (3, 4, 5)]
    return GroupPlan(offset, *unsigned, *signed)
