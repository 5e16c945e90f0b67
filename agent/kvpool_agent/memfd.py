"""Shared-memory files (memfd) and their seals.

Invariant: a memfd that passed `check_sealed` can neither shrink nor grow, so a mapping of it never faults (SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os

from kvpool_core.errors import ArenaError

F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1; missing from Python's fcntl. Existing writable mappings stay, new ones are refused."""
MFD_HUGE_SHIFT = 26
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_payload(capacity_bytes: int, huge_page_bytes: int) -> int:
    """A memfd of `capacity_bytes` without pages yet; ArenaError when the kernel refuses."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page_bytes:
        flags |= os.MFD_HUGETLB | ((huge_page_bytes.bit_length() - 1) << MFD_HUGE_SHIFT)
    return _create("kvpool-payload", capacity_bytes, flags)


def create_table(size_bytes: int) -> int:
    """A sparse memfd for a slot table: untouched records cost nothing."""
    return _create("kvpool-table", size_bytes, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _create(name: str, size_bytes: int, flags: int) -> int:
    try:
        fd = os.memfd_create(name, flags)
    except OSError as error:
        raise ArenaError(f"cannot create {name}: {error.strerror}: are huge pages of this size enabled?") from error
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise ArenaError(f"cannot size {name} to {size_bytes} bytes: {error.strerror}") from error
    return fd


def seal_payload(fd: int) -> None:
    """Fix the size for ever."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)


def seal_table(fd: int) -> None:
    """Fix the size and forbid new writable mappings: call after the own writable mapping was made."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | _SIZE_SEALS | fcntl.F_SEAL_SEAL)


def check_sealed(fd: int, *, size_bytes: int | None = None) -> int:
    """The size of a memfd that was handed over; ArenaError when it is none, not sealed, or of another size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise ArenaError(f"the descriptor handed over is not a memfd: {error.strerror}") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise ArenaError("the memfd handed over is not sealed against changes of its size")
    if size_bytes is not None and size != size_bytes:
        raise ArenaError(f"the memfd handed over has {size} bytes, not {size_bytes}")
    return size


def map_shared(fd: int, size_bytes: int) -> mmap.mmap:
    """A writable shared mapping."""
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise ArenaError(f"cannot map {size_bytes} bytes of the arena: {error.strerror}") from error
