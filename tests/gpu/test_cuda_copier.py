"""Copies between device memory and the arena: every byte, in order with the engine's stream, registered or pageable."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from typing import Any

import pytest

BLOCK_BYTES = 64 * 1024
BLOCKS = 32
ARENA_BYTES = BLOCKS * BLOCK_BYTES


def new_arena() -> tuple[mmap.mmap, int]:
    """A memfd mapping as the agent hands it out, and its address."""
    descriptor = os.memfd_create("gpu-test")
    os.ftruncate(descriptor, ARENA_BYTES)
    arena = mmap.mmap(descriptor, ARENA_BYTES)
    os.close(descriptor)
    return arena, ctypes.addressof(ctypes.c_char.from_buffer(arena))


def fragments(first: int, second: int) -> tuple[Any, Any, Any]:
    """Addresses of all blocks on both sides and their sizes."""
    import numpy as np

    offsets = np.arange(BLOCKS, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    return offsets + np.uint64(first), offsets + np.uint64(second), np.full(BLOCKS, BLOCK_BYTES, dtype=np.int64)


@pytest.mark.gpu
@pytest.mark.parametrize("registered", [True, False])
def test_blocks_survive_the_way_out_and_back(registered: bool) -> None:
    import torch

    from kvpool_vllm.copiers import CudaCopier

    device = torch.device("cuda", 0)
    copier = CudaCopier(device)
    arena, address = new_arena()
    held = copier.register(address, ARENA_BYTES) if registered else []
    assert bool(held) == registered
    source = torch.randint(0, 256, (ARENA_BYTES,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    out, to, sizes = fragments(source.data_ptr(), address)
    copier.copy(out, to, sizes, to_cache=False, after=copier.mark())
    assert bytes(arena) == source.cpu().numpy().tobytes()
    back, into, sizes = fragments(address, target.data_ptr())
    copier.copy(back, into, sizes, to_cache=True, after=copier.mark())
    assert torch.equal(source, target)
    copier.unregister(held)


@pytest.mark.gpu
def test_store_comes_after_what_the_engine_has_queued() -> None:
    import torch

    from kvpool_vllm.copiers import CudaCopier

    device = torch.device("cuda", 0)
    copier = CudaCopier(device)
    arena, address = new_arena()
    source = torch.zeros(ARENA_BYTES, dtype=torch.uint8, device=device)
    torch.cuda._sleep(200_000_000)  # about a tenth of a second on the engine's stream
    source.fill_(7)
    out, to, sizes = fragments(source.data_ptr(), address)
    copier.copy(out, to, sizes, to_cache=False, after=copier.mark())
    assert bytes(arena) == b"\x07" * ARENA_BYTES


@pytest.mark.gpu
def test_pieces_of_a_large_arena_tile_it() -> None:
    from kvpool_vllm.copiers import MAX_REGISTERED_BYTES, register_pieces

    size = 2 * MAX_REGISTERED_BYTES + 4096
    pieces = register_pieces(1 << 40, size)
    assert sum(piece for _, piece in pieces) == size
    assert all(start + piece == after for (start, piece), (after, _) in itertools.pairwise(pieces))
    assert max(piece for _, piece in pieces) <= MAX_REGISTERED_BYTES
