"""One step in forming and healing the managed Valkey: look at every node, plan, act, tell.

Blocking; for a thread of the caller's. Invariant: nothing is remembered between steps, so that any operator may do the next
one, and a step that was cut off anywhere is made good by the next; no command leaves an operator that does not lead.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvpool_core.errors import KVPoolError
from kvpool_operator.fence import Fence
from kvpool_operator.kube_errors import NotLeaderError
from kvpool_operator.valkey.acl import OPERATOR
from kvpool_operator.valkey.admin import UNAUTHENTICATED, execute, look
from kvpool_operator.valkey.commands import Claim, Command, Forget, Migrate, Pod, Reset
from kvpool_operator.valkey.meeting import served
from kvpool_operator.valkey.members import PATIENCE_SECONDS, SeenPod, Waiting, members_of
from kvpool_operator.valkey.topology import plan, replicas_needed
from kvpool_operator.valkey.wire import Access

__all__ = ["HealResult", "Pod", "Waiting", "step"]

logger = logging.getLogger(__name__)

MAX_THREADS = 32
SECOND_LOOK_SECONDS = 0.3
"""Much longer than a slot's new owner takes to know that it is."""
INTERRUPTED = "HealingInterrupted"
NEWS = (Reset, Forget, Claim, Migrate)
"""What is worth an Event."""


@dataclass(frozen=True, slots=True)
class HealResult:
    """What a step saw and did.

    shards: wanted. ready: of those, they answer, have slots and say that the cluster is well. slots_covered: of 16384,
    by nodes that answer. replicas: what the StatefulSet must have now; more than `shards` while pods are being emptied.
    refusing: uids of pods that refuse the login, so that nothing can be done with them.
    actions: sentences for Events. waiting: empty when all is well and nothing is under way.
    """

    shards: int
    ready: int
    slots_covered: int
    replicas: int
    refusing: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    waiting: tuple[Waiting, ...] = ()


def step(
    pods: Sequence[Pod],
    *,
    shards: int,
    password: str,
    fence: Fence,
    timeout_seconds: float = 2.0,
    patience_seconds: float = PATIENCE_SECONDS,
) -> HealResult:
    """Do what can be done now; safe to be called at any time. pods: every one that exists. NotLeaderError when the fence shuts.

    timeout_seconds: for connecting with the login, and for each exchange. patience_seconds: how long slots wait for a silent node.
    """
    access = Access(OPERATOR, password, timeout_seconds)
    here = [pod for pod in pods if not pod.is_terminating]
    with ThreadPoolExecutor(
        max_workers=min(MAX_THREADS, max(1, len(here))), thread_name_prefix="valkey-heal"
    ) as threads:
        seen = list(threads.map(lambda pod: look(pod, access), here))
        planned = plan(seen, shards, patience_seconds=patience_seconds)
        if planned.disputed:
            time.sleep(SECOND_LOOK_SECONDS)
            seen = list(threads.map(lambda pod: look(pod, access), here))
            planned = plan(seen, shards, patience_seconds=patience_seconds, confirmed=planned.disputed)
        done, problem = _carry_out(planned.commands, access, fence, threads)
    for command in done:
        logger.info("valkey healing: pod=%s %s", command.pod.name, command)
    return HealResult(
        shards=shards,
        ready=_ready(seen, shards),
        slots_covered=served(members_of(seen)).bit_count(),
        replicas=replicas_needed(seen, shards),
        refusing=tuple(one.pod.uid for one in seen if one.problem and one.problem.reason == UNAUTHENTICATED),
        actions=tuple(dict.fromkeys(str(command) for command in done if isinstance(command, NEWS))),
        waiting=planned.waiting + (() if problem is None else (problem,)),
    )


def _ready(seen: Sequence[SeenPod], shards: int) -> int:
    wanted = [member.view for member in members_of(seen) if member.pod.ordinal < shards]
    return sum(bool(view.slots) and view.is_ok for view in wanted)


def _carry_out(
    commands: Sequence[Command], access: Access, fence: Fence, threads: ThreadPoolExecutor
) -> tuple[list[Command], Waiting | None]:
    """Kind after kind, the nodes of one kind at once; what was done, and what ended it early."""
    done: list[Command] = []
    for _, same_kind in itertools.groupby(commands, key=type):
        batch = list(same_kind)
        errors = list(threads.map(lambda command: _try(command, access, fence), batch))
        done += [command for command, error in zip(batch, errors, strict=True) if error is None]
        failed = [str(error) for error in errors if error is not None]
        if failed:
            return done, Waiting(INTERRUPTED, "; ".join(failed))
    return done, None


def _try(command: Command, access: Access, fence: Fence) -> KVPoolError | None:
    try:
        execute(command, access, fence)
    except NotLeaderError:
        raise
    except KVPoolError as error:
        return error
    return None
