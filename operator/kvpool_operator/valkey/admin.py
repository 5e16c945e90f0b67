"""Looking at and commanding one pod of the managed Valkey, each in one round trip.

Invariant: a node that does not answer, or not as expected, is a value (`SeenPod.problem`), never an exception of `look`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from valkey.exceptions import ResponseError

from kvpool_operator.fence import Fence
from kvpool_operator.valkey.commands import Command, Pod
from kvpool_operator.valkey.members import SeenPod, Waiting
from kvpool_operator.valkey.view import NodeView, ValkeyReplyError, parse_view
from kvpool_operator.valkey.wire import (
    Access,
    Arguments,
    Reply,
    ValkeyForbiddenError,
    ValkeyRefusedError,
    ValkeyUnauthenticatedError,
    ValkeyUnreachableError,
    Wire,
)

UNREACHABLE, UNAUTHENTICATED, REFUSED = "ShardUnreachable", "ValkeyUnauthenticated", "ShardRefuses"
HARMLESS = ("unknown node",)
"""Parts of error replies that say: this is done already."""
_LOOK: tuple[Arguments, ...] = (
    ("CLUSTER", "NODES"),
    ("CLUSTER", "INFO"),
    ("INFO", "server", "memory"),
    ("CLUSTER", "GETSLOTMIGRATIONS"),
    ("TIME",),
)


def look(pod: Pod, access: Access) -> SeenPod:
    """What a pod's node says; never raises."""
    if not pod.host:
        return SeenPod(pod, None, Waiting(UNREACHABLE, f"{pod.name} has no address yet"))
    try:
        return SeenPod(pod, fetch_view(pod, access))
    except ValkeyUnauthenticatedError as error:
        remedy = "it runs with former users and is replaced by one with the pool's present Secret"
        return SeenPod(pod, None, Waiting(UNAUTHENTICATED, f"{str(error).rstrip('.')}; {remedy}"))
    except ValkeyForbiddenError as error:
        remedy = "delete the shards' pods one after another: they start with the pool's present users"
        return SeenPod(pod, None, Waiting(REFUSED, f"{error}; {remedy}"))
    except ValkeyUnreachableError as error:
        return SeenPod(pod, None, Waiting(UNREACHABLE, str(error)))
    except ValkeyReplyError as error:
        return SeenPod(pod, None, Waiting(REFUSED, str(error)))
    except ValkeyRefusedError as error:
        return SeenPod(pod, None, Waiting(REFUSED, f"{error}; the managed Valkey's image must be Valkey 9.0 or later"))


def fetch_view(pod: Pod, access: Access) -> NodeView:
    """What a pod's node says; raises the errors of `wire` and ValkeyReplyError."""
    with Wire(pod.host, pod.port, access, name=pod.name) as wire:
        replies = wire.exchange(_LOOK)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise wire.translated(reply)
    try:
        nodes, cluster_info, info, migrations, clock = replies
        seconds, microseconds = (int(part) for part in cast(list[bytes], clock))
        return parse_view(
            nodes=cast(bytes, nodes).decode(),
            cluster_info=cast(bytes, cluster_info).decode(),
            info=cast(bytes, info).decode(),
            migrations=[_as_map(job) for job in cast(list[list[Reply]], migrations)],
            time_ms=seconds * 1000 + microseconds // 1000,
        )
    except (TypeError, AttributeError, ValueError) as error:
        raise ValkeyReplyError(f"{pod.name} at {pod.host} does not answer as Valkey does: {error}") from error


def execute(command: Command, access: Access, fence: Fence) -> None:
    """Have a pod's node carry out a command; raises the errors of `wire`, and NotLeaderError when the fence is shut."""
    with Wire(command.pod.host, command.pod.port, access, name=command.pod.name, fence=fence) as wire:
        for reply in wire.exchange(command.wire()):
            if isinstance(reply, ResponseError) and not any(text in str(reply).lower() for text in HARMLESS):
                raise wire.translated(reply)


def _as_map(pairs: Sequence[Reply]) -> dict[str, str]:
    texts = [part.decode() if isinstance(part, bytes) else str(part) for part in pairs]
    return dict(zip(texts[::2], texts[1::2], strict=True))
