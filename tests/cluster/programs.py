"""Kubernetes, etcd, Helm and CoreDNS, built from the Go modules that go.mod beside this file names.

Invariant: what is in an entry of the cache is decided by go.mod, go.sum, our two mains, the Go version and the flags. Standard
library only: it runs before anything is installed. Cut off, Go's own build cache goes on where it was.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.harness.provision_cache import ProvisionError, key_of, make_once
from tests.harness.provision_commands import run_logged

FOLDER = Path(__file__).resolve().parent
_MAINS = ("./coredns", "./pause")
_CLIENTS = ("k8s.io/kubernetes/cmd/kubectl", "helm.sh/helm/v4/cmd/helm")


def programs_entry(cache: Path) -> Path:
    """Where the programs of this checkout's go.mod lie."""
    return cache / f"cluster-bin-{_key(*packages())}"


def clients_entry(cache: Path) -> Path:
    """Where kubectl and helm lie when nothing else is needed: the cluster is somebody else's."""
    return cache / f"cluster-clients-{_key(*_CLIENTS)}"


def make_programs(cache: Path, logs: Path, environment: dict[str, str], *, clients_only: bool = False) -> None:
    """Build what is missing."""
    wanted = _CLIENTS if clients_only else packages()
    entry = clients_entry(cache) if clients_only else programs_entry(cache)

    def make(folder: Path) -> None:
        run_logged(
            ["nice", "-n", "19", "go", "build", *_flags(), "-o", f"{folder}/", *wanted],
            log=logs / "provision-cluster-programs.log",
            environment=environment | {"CGO_ENABLED": "0", "GOFLAGS": ""},
            what="building the cluster's programs",
            remedy="Run it again: what was compiled is kept.",
            folder=FOLDER,
        )
        if (folder / "server").exists():
            (folder / "server").rename(folder / "etcd")  # its package is named after its folder

    hint = "2 minutes" if clients_only else "12 minutes on two cores; Go's caches take 5 GB"
    make_once(entry, make, what="cluster programs", hint=hint)


def kubernetes_version() -> str:
    """As go.mod says it, with its v."""
    lines = (FOLDER / "go.mod").read_text().splitlines()
    (version,) = [line.split()[1] for line in lines if line.startswith("\tk8s.io/kubernetes v")]
    return version


def packages() -> tuple[str, ...]:
    """What is built: the tools that go.mod names, and our own mains."""
    found = re.search(r"^tool \(\n(.*?)^\)", (FOLDER / "go.mod").read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ProvisionError(f"{FOLDER / 'go.mod'} names no tools")
    return (*found.group(1).split(), *_MAINS)


def _flags() -> list[str]:
    version = f"-X k8s.io/component-base/version.gitVersion={kubernetes_version()}"
    return ["-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {version}"]


def _key(*built: str) -> str:
    sources = [FOLDER / name for name in ("go.mod", "go.sum", "coredns/main.go", "pause/main.go")]
    return key_of(*(path.read_bytes() for path in sources), _go_version(), *_flags(), *built)


def _go_version() -> str:
    if shutil.which("go") is None:
        raise ProvisionError(
            "the test cluster is built with Go, and there is no `go`: install Go 1.26 or newer, or set KVPOOL_KUBECONFIG"
        )
    asked = subprocess.run(
        ["go", "version"], cwd=FOLDER, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if asked.returncode:
        raise ProvisionError(f"Go cannot build the test cluster: {asked.stderr.strip()}")
    return asked.stdout
