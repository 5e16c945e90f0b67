"""The copy itself: lists of (source, destination, bytes) between the engine's cache and the arena.

Invariant: `copy` returns after the bytes are where they belong; it runs on a copy thread, never on the engine's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvpool_vllm.copy_plan import Pointers, Sizes

MAX_REGISTERED_BYTES = 64 * 1024**3
"""Largest piece of host memory registered in one call: beyond it drivers refuse (vLLM 0.32 `cpu/gpu_worker.py`)."""


class Copier(Protocol):
    """Copies between cache and arena on one kind of device."""

    def mark(self) -> object:
        """Called on the engine's thread: the point in its work that a copy has to come after."""

    def copy(self, source: Pointers, destination: Pointers, sizes: Sizes, *, to_cache: bool, after: object) -> None:
        """Copy fragment by fragment; addresses are absolute, sizes in bytes."""

    def register(self, address: int, size: int) -> list[int]:
        """Prepare the arena's mapping for fast copies; what it returns goes to `unregister`."""

    def unregister(self, registered: list[int]) -> None:
        """The mapping is about to go."""


class CpuCopier:
    """Cache and arena are both host memory: memmove, which lets other Python threads run."""

    def mark(self) -> object:
        """The engine computes synchronously: nothing to wait for."""
        return None

    def copy(
        self,
        source: Pointers,
        destination: Pointers,
        sizes: Sizes,
        *,
        to_cache: bool,  # noqa: ARG002 both directions are the same
        after: object,  # noqa: ARG002 nothing to wait for
    ) -> None:
        """One memmove a fragment."""
        move = ctypes.memmove
        for src, dst, size in zip(source.tolist(), destination.tolist(), sizes.tolist(), strict=True):
            move(dst, src, size)

    def register(self, address: int, size: int) -> list[int]:  # noqa: ARG002
        """Nothing to register."""
        return []

    def unregister(self, registered: list[int]) -> None:
        """Nothing was registered."""


class CudaCopier:
    """Cache on the device, arena in host memory: vLLM's batched copy operation on a stream of its own.

    Order (vLLM 0.32 `v1/kv_offload/cpu/gpu_worker.py`): both directions wait for the engine's stream as of `mark`;
    a store reads in stream order, a load may read host memory in any order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {True: torch.cuda.Stream(device), False: torch.cuda.Stream(device)}

    def mark(self) -> object:
        """An event on the engine's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, source: Pointers, destination: Pointers, sizes: Sizes, *, to_cache: bool, after: object) -> None:
        """One driver call for all fragments, then wait for the stream without holding up the engine."""
        from vllm import _custom_ops as ops

        stream = self._streams[to_cache]
        if isinstance(after, torch.cuda.Event):
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            ops.swap_blocks_batch(
                torch.from_numpy(source.astype(np.int64)),
                torch.from_numpy(destination.astype(np.int64)),
                torch.from_numpy(sizes),
                is_src_access_order_any=to_cache,
            )
            done = torch.cuda.Event()
            done.record(stream)
        done.synchronize()

    def register(self, address: int, size: int) -> list[int]:
        """Register the mapping piece by piece; on a refusal all of it stays pageable: slower, as correct."""
        from vllm.v1.kv_offload.cpu.host_register import host_register

        registered: list[int] = []
        with torch.cuda.device(self._device):
            for start, piece in register_pieces(address, size):
                if not host_register(start, piece):
                    self.unregister(registered)
                    return []
                registered.append(start)
        return registered

    def unregister(self, registered: list[int]) -> None:
        """Undo the registrations, the last first."""
        from vllm.v1.kv_offload.cpu.host_register import host_unregister

        with torch.cuda.device(self._device):
            while registered:
                host_unregister(registered.pop())


def register_pieces(address: int, size: int) -> Sequence[tuple[int, int]]:
    """(address, bytes) of the pieces in which a mapping is registered; slabs are aligned, no slot straddles two."""
    return [
        (address + start, min(MAX_REGISTERED_BYTES, size - start)) for start in range(0, size, MAX_REGISTERED_BYTES)
    ]


def make_copier(device: torch.device) -> Copier:
    """The copier for a cache on `device`."""
    return CudaCopier(device) if device.type == "cuda" else CpuCopier()
