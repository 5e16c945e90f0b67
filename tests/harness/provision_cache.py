"""The user's cache folder: what is slow to make is made once per set of inputs and kept there.

Invariant: an entry whose `.complete` file exists is whole; whatever else lies in the folder may be half made, and is made
anew or gone on with. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT_UNUSED_DAYS = 14
"""Entries of other inputs (older locks, other clones) are dropped after this long without use: an engine venv is 5 GB."""
_COMPLETE = ".complete"


class ProvisionError(Exception):
    """Something could not be provided; the message says what, and what to do."""


def cache_folder(environment: dict[str, str]) -> Path:
    """KVPOOL_CACHE, else kvpool in XDG_CACHE_HOME, else ~/.cache/kvpool."""
    if chosen := environment.get("KVPOOL_CACHE"):
        return Path(chosen).absolute()
    home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "kvpool"


def key_of(*inputs: str | bytes) -> str:
    """A short name for a set of inputs: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for value in inputs:
        data = value.encode() if isinstance(value, str) else value
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:12]


def is_complete(entry: Path) -> bool:
    """Whether the entry is whole."""
    return (entry / _COMPLETE).exists()


def make_once(entry: Path, make: Callable[[Path], None], *, what: str, hint: str) -> None:
    """Have `make` fill the folder `entry` unless it is whole already. Safe against other runs, and against being cut off."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with _locked(entry.with_name(entry.name + ".lock"), what=what):
        made = not is_complete(entry)
        if made:
            say(f"{what}: making ({hint})")
            entry.mkdir(exist_ok=True)
            make(entry)
        (entry / _COMPLETE).touch()  # also tells when it was last used
    say(f"{what}: ready ({f'{time.monotonic() - started:.1f} s' if made else 'cached'})")


def drop_unused(cache: Path, kept: set[Path], now: float) -> None:
    """Remove entries that no run asked for during the last KEPT_UNUSED_DAYS."""
    for stamp in cache.glob(f"*-*/{_COMPLETE}"):
        entry = stamp.parent
        if entry not in kept and now - stamp.stat().st_mtime > KEPT_UNUSED_DAYS * 86400:
            with _locked(entry.with_name(entry.name + ".lock"), what=entry.name):
                stamp.unlink(missing_ok=True)
                shutil.rmtree(entry, ignore_errors=True)
            say(f"{entry.name}: dropped, not used for {KEPT_UNUSED_DAYS} days")


def say(line: str) -> None:
    """One line of progress."""
    print(f"provision: {line}", file=sys.stderr, flush=True)


@contextmanager
def _locked(path: Path, *, what: str) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{what}: waiting for another run that makes it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
