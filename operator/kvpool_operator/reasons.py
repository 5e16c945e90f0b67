"""Types and reasons of a pool's conditions and Events.

Invariant: every reason here has an entry `### <Reason>` in docs/troubleshooting.md, and no entry there lacks a reason (a
test compares both ways).
"""

from __future__ import annotations

from typing import Final

# --- condition types ------------------------------------------------------------------------------------------------
READY: Final = "Ready"
SPEC_ACCEPTED: Final = "SpecAccepted"
AGENTS_AVAILABLE: Final = "AgentsAvailable"
VALKEY_AVAILABLE: Final = "ValkeyAvailable"
ROLLOUT_COMPLETE: Final = "RolloutComplete"
CONDITION_TYPES: Final = (READY, SPEC_ACCEPTED, AGENTS_AVAILABLE, VALKEY_AVAILABLE, ROLLOUT_COMPLETE)

# --- all is well ------------------------------------------------------------------------------------------------------
ALL_PARTS_READY: Final = "AllPartsReady"
ACCEPTED: Final = "Accepted"
ALL_AGENTS_READY: Final = "AllAgentsReady"
ALL_SHARDS_READY: Final = "AllShardsReady"
CONNECTED: Final = "Connected"
NOT_CONFIGURED: Final = "NotConfigured"
UP_TO_DATE: Final = "UpToDate"

# --- the resource -----------------------------------------------------------------------------------------------------
NAME_CONFLICT: Final = "NameConflict"
FORMER_OBJECTS_GOING: Final = "FormerObjectsGoing"
SPEC_NOT_UNDERSTOOD: Final = "SpecNotUnderstood"
APPLY_REFUSED: Final = "ApplyRefused"
REQUEST_REFUSED: Final = "RequestRefused"
PAUSED: Final = "Paused"

# --- pods of any part -------------------------------------------------------------------------------------------------
IMAGE_PULL_FAILED: Final = "ImagePullFailed"
SECRET_MISSING: Final = "SecretMissing"
QUOTA_EXCEEDED: Final = "QuotaExceeded"
POD_REFUSED: Final = "PodRefused"
UNSCHEDULABLE: Final = "Unschedulable"
CONTAINER_RESTARTED: Final = "ContainerRestarted"
CONTAINER_CRASHING: Final = "ContainerCrashing"
PODS_STARTING: Final = "PodsStarting"
NODE_NOT_READY: Final = "NodeNotReady"

# --- agents -----------------------------------------------------------------------------------------------------------
NO_NODE_MATCHES: Final = "NoNodeMatches"
CAPACITY_EXCEEDS_NODE: Final = "CapacityExceedsNode"
ARENA_PENDING: Final = "ArenaPending"
AGENT_NOT_READY: Final = "AgentNotReady"
AGENTS_SILENT: Final = "AgentsSilent"

# --- Valkey -----------------------------------------------------------------------------------------------------------
CLUSTER_FORMING: Final = "ClusterForming"  # these nine are given by kvpool_operator.valkey
SHARD_MISSING: Final = "ShardMissing"
CLUSTER_HEALING: Final = "ClusterHealing"
CLUSTER_SETTLING: Final = "ClusterSettling"
SLOTS_MOVING: Final = "SlotsMoving"
HEALING_INTERRUPTED: Final = "HealingInterrupted"
SHARD_UNREACHABLE: Final = "ShardUnreachable"
SHARD_REFUSES: Final = "ShardRefuses"
VALKEY_UNAUTHENTICATED: Final = "ValkeyUnauthenticated"
VALKEY_PASSWORD_WRONG: Final = "ValkeyPasswordWrong"
VALKEY_FORBIDDEN: Final = "ValkeyForbidden"
VALKEY_UNREACHABLE: Final = "ValkeyUnreachable"
VALKEY_DEGRADED: Final = "ValkeyDegraded"
AWAITING_AGENTS: Final = "AwaitingAgents"

# --- routing ----------------------------------------------------------------------------------------------------------
ROUTER_UNAVAILABLE: Final = "RouterUnavailable"

# --- rollout ----------------------------------------------------------------------------------------------------------
ROLLING_OUT: Final = "RollingOut"
ROLLOUT_STOPPED: Final = "RolloutStopped"
WAITING_FOR_OTHER_POOL: Final = "WaitingForOtherPool"

# --- Events only ------------------------------------------------------------------------------------------------------
VALKEY_HEALED: Final = "ValkeyHealed"
DRIFT_CORRECTED: Final = "DriftCorrected"
AGENT_REPLACED: Final = "AgentReplaced"
PURGING: Final = "Purging"
KEYS_PURGED: Final = "KeysPurged"
KEYS_LEFT: Final = "KeysLeft"
LEADER_CHANGED: Final = "LeaderChanged"

WELL: Final = frozenset(
    {ALL_PARTS_READY, ACCEPTED, ALL_AGENTS_READY, ALL_SHARDS_READY, CONNECTED, NOT_CONFIGURED, UP_TO_DATE}
)
"""Reasons of conditions that are True because nothing is wrong."""


PROGRESS: Final = frozenset(
    {
        FORMER_OBJECTS_GOING,
        PODS_STARTING,
        CLUSTER_FORMING,
        CLUSTER_SETTLING,
        SLOTS_MOVING,
        AWAITING_AGENTS,
        ROLLING_OUT,
        WAITING_FOR_OTHER_POOL,
        PAUSED,
    }
)
"""Reasons of what goes by: their Events are no warnings."""


def all_reasons() -> tuple[str, ...]:
    """Every reason, in the order of this file."""
    names = [name for name, value in globals().items() if name.isupper() and isinstance(value, str)]
    return tuple(globals()[name] for name in names if globals()[name] not in CONDITION_TYPES)
