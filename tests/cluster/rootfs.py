"""The base of all images: a small Debian with its own Python, in place of the `python:3.11-slim` of a registry.

Invariant: made from Debian's packages alone. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

from tests.harness.provision_cache import key_of, make_once
from tests.harness.provision_commands import run_logged

_SUITE = "bookworm"
_INCLUDED = ("python3", "python3-venv", "ca-certificates", "libnuma1")
"""libnuma1 is what vLLM for CPU loads."""
_HOME = "root"
_HOOK = f'chmod 755 "$1/{_HOME}"'
"""A venv may lie in root's home, and is mounted at the same path into pods that run as somebody else."""


def rootfs_entry(cache: Path) -> Path:
    """Where rootfs.tar lies."""
    return cache / f"cluster-rootfs-{key_of(_SUITE, *_INCLUDED, _HOOK)}"


def make_rootfs(cache: Path, logs: Path, environment: dict[str, str]) -> None:
    """Make it if it is missing. Its mounts are in a namespace of their own: cut off, none is left."""

    def make(entry: Path) -> None:
        target = entry / "rootfs.tar"
        target.unlink(missing_ok=True)
        run_logged(
            [
                *("unshare", "--mount", "--propagation", "private"),
                *("mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(_INCLUDED)}"),
                *(f"--customize-hook={_HOOK}", _SUITE, target),
            ],
            log=logs / "provision-cluster-rootfs.log",
            environment=environment,
            what="making the images' base",
            remedy="Are Debian's packages reached?",
        )

    make_once(rootfs_entry(cache), make, what="cluster base image", hint="45 seconds, 225 MB")
