"""Why a pod that opted in was not given the cache.

Invariant: every reason here has an entry `### <Reason>` under "Why a pod was not given the cache" in
docs/troubleshooting.md, and no entry there lacks a reason (a test compares both ways).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# --- the pool ---------------------------------------------------------------------------------------------------------
POOL_NOT_NAMED: Final = "PoolNotNamed"
POOL_NOT_FOUND: Final = "PoolNotFound"
POOL_BEING_DELETED: Final = "PoolBeingDeleted"
NAMESPACE_NOT_ALLOWED: Final = "NamespaceNotAllowed"
NO_READY_AGENT: Final = "NoReadyAgent"
IMAGE_MISSING_ON_NODE: Final = "ImageMissingOnNode"
PULL_SECRET_MISSING: Final = "PullSecretMissing"

# --- the namespace ----------------------------------------------------------------------------------------------------
NAMESPACE_UNKNOWN: Final = "NamespaceUnknown"
POD_SECURITY: Final = "PodSecurity"
POLICY_REFUSES: Final = "PolicyRefuses"

# --- the pod ----------------------------------------------------------------------------------------------------------
STATIC_POD: Final = "StaticPod"
WINDOWS_POD: Final = "WindowsPod"
SANDBOXED_RUNTIME: Final = "SandboxedRuntime"
USER_NAMESPACE: Final = "UserNamespace"
NOT_A_PREDICTOR: Final = "NotAPredictor"
DISAGGREGATED_ROLE: Final = "DisaggregatedRole"
NAME_TAKEN: Final = "NameTaken"
LABEL_TAKEN: Final = "LabelTaken"
MOUNT_PATH_TAKEN: Final = "MountPathTaken"

# --- the engine -------------------------------------------------------------------------------------------------------
CONTAINER_NOT_FOUND: Final = "ContainerNotFound"
NO_ENGINE_FOUND: Final = "NoEngineFound"
SEVERAL_ENGINES: Final = "SeveralEngines"
SHELL_COMMAND: Final = "ShellCommand"
NOT_A_VLLM_SERVER: Final = "NotAVllmServer"
COMMAND_NOT_EXTENSIBLE: Final = "CommandNotExtensible"
PORT_UNKNOWN: Final = "PortUnknown"
ENGINE_VERSION_UNSUPPORTED: Final = "EngineVersionUnsupported"
ENGINE_UNSUPPORTED: Final = "EngineUnsupported"
OWN_KV_TRANSFER: Final = "OwnKvTransfer"
OWN_KV_EVENTS: Final = "OwnKvEvents"
OWN_HASH_ALGORITHM: Final = "OwnHashAlgorithm"
PREFIX_CACHING_OFF: Final = "PrefixCachingOff"
CONFIG_FILE: Final = "ConfigFile"
ARGUMENT_UNKNOWN: Final = "ArgumentUnknown"


MOST_CHARACTERS = 1000
"""Of what is written on a pod; all its annotations together may have 256 KiB."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The pod stays as it is; `message` says what was found and what to do."""

    reason: str
    message: str

    @property
    def text(self) -> str:
        """Both, as one line of at most MOST_CHARACTERS: what an API server or policy says may be long, and anything."""
        line = "".join(each if each.isprintable() else " " for each in f"{self.reason}: {self.message}")
        return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"


def all_reasons() -> tuple[str, ...]:
    """Every reason, in the order of this file."""
    return tuple(value for name, value in globals().items() if name.isupper() and isinstance(value, str))
