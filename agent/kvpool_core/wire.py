"""Messages between engine and agent, holder and agent, and on the event stream (DESIGN section 14).

Every message is a msgpack array [type, request id, fields...]; pushed messages have request id 0. Full duplex: any
side may send at any time. Invariant: a message that decodes has the types stated here; what decodes not is a FrameError.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from kvpool_core.errors import FrameError
from kvpool_core.frames import encode_frame

PROTOCOL_VERSION: Final = 2
"""1: all but what says "since 2". A message may grow at its end: receivers leave out what they do not know."""
PROTOCOL_OLDEST: Final = 1
"""Oldest version still spoken: N and N-1."""
PROTOCOL_STANDBY: Final = 2
"""First version with Standby and Unmapped."""
PROTOCOL_LOAD: Final = 2
"""First version with EngineLoad."""

PREFETCH_KEYS_MAX: Final = 262_144
"""Keys in one Prefetch over all groups: a million tokens in several groups. A frame holds nearly twice as many."""
RESERVE_KEYS_MAX: Final = 65_536
"""Keys in one Reserve: a step of the engine stores a few hundred."""
ANNOUNCED_SLOTS_MAX: Final = 262_144
"""Leased slots in one Announce."""

# Codes of Refused that a receiver acts on; others are for people.
AUTHENTICATION_UNAVAILABLE: Final = "AuthenticationUnavailable"
"""Nothing is known against the engine: it tries again and keeps what it has."""
NAMESPACE_NOT_ALLOWED: Final = "NamespaceNotAllowed"
ARENA_PENDING: Final = "ArenaPending"
"""To a peer of version 1 while there is no arena: it tries again."""
TEMPORARY_REFUSALS: Final = frozenset({AUTHENTICATION_UNAVAILABLE, ARENA_PENDING})

# States of a key in a verdict, one byte each.
MISS: Final = 0
"""Not to be loaded: absent, beyond the usable prefix, over the lease quota, or not worth fetching."""
PENDING: Final = 1
"""Exists in `valkey` and is being fetched into the arena."""
HIT: Final = 2
"""Resident in the arena and leased to the asking engine."""
LOCAL: Final = 3
"""Inside the `local_blocks` that the engine said its GPU holds: neither looked up nor leased."""

# Where a key lay when its Prefetch arrived, one byte each.
TIER_NONE: Final = 0
TIER_RAM: Final = 1
TIER_VALKEY: Final = 2
TIER_NAMES: Final = {TIER_RAM: "ram", TIER_VALKEY: "valkey"}

# Answers to a reserved key.
SLOT: Final = 0
EXISTS: Final = 1
FULL: Final = 2


class Message(msgspec.Struct, array_like=True, frozen=True, kw_only=False):
    """Base: `rid` is the request id that a reply repeats; 0 for pushed messages."""

    rid: int


# --- connection ---------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="Hello"):
    """First message of an engine's process. `role` is "scheduler" or "worker"; `block_size` in tokens per hash.

    dp_rank: as the API server at `endpoint` counts its engines.
    `arena_id` (since 2): the arena that the process maps, b"" when it maps none.
    """

    protocol_min: int
    protocol_max: int
    engine_id: str
    role: str
    rank: int
    world_size: int
    dp_rank: int
    endpoint: str
    served_names: list[str]
    block_size: int
    hash_seed: str
    token: str
    arena_id: bytes = b""


class Welcome(Message, frozen=True, tag="Welcome"):
    """Answer to Hello; carries two descriptors as SCM_RIGHTS: payload memfd, slot table memfd (read-only)."""

    protocol: int
    boot_id: bytes
    arena_id: bytes
    capacity_bytes: int
    lease_seconds: float


class Standby(Message, frozen=True, tag="Standby"):
    """Answer to Hello while there is no arena to give, repeated every few seconds; Welcome follows on this connection (since 2).

    `unmap`: end copies in flight, unmap the arena that the process maps, and say Unmapped: the node has no room for two.
    `reason`: what the agent waits for.
    """

    unmap: bool
    reason: str


class Unmapped(Message, frozen=True, tag="Unmapped"):
    """Answer to Standby: this process maps no arena any more (since 2)."""


class Refused(Message, frozen=True, tag="Refused"):
    """The agent closes the connection after this. `code` is CamelCase, `message` says what to do."""

    code: str
    message: str


class GroupLayout(msgspec.Struct, array_like=True, frozen=True):
    """One KV-cache group as a worker registers it.

    payload_bytes: canonical payload of a block, all ranks together. tokens_per_block: tokens of one block.
    window_blocks: blocks that a load needs at the end of a prefix; 0 = full attention, all of the prefix.
    """

    group: int
    payload_bytes: int
    tokens_per_block: int
    window_blocks: int


class RegisterScheduler(Message, frozen=True, tag="RegisterScheduler"):
    """The scheduler's part of the fingerprint (16 bytes), sent when the weights are identified.

    `problem` not empty: the engine cannot be identified (the domain stays unknown: no hits, no stores).
    """

    part: bytes
    problem: str


class RegisterWorker(Message, frozen=True, tag="RegisterWorker"):
    """A worker's part: `shared_part` must be equal on all ranks, `rank_part` is b"" when parallelism-agnostic."""

    shared_part: bytes
    rank_part: bytes
    groups: list[GroupLayout]


class Domain(Message, frozen=True, tag="Domain"):
    """Pushed to every connection of an engine. `state`: "pending" | "known" | "refused"; domain is b"" unless known."""

    state: str
    domain: bytes
    reason: str
    groups: list[GroupLayout]


# --- lookups and loads ---------------------------------------------------------------------------------------------


class GroupKeys(msgspec.Struct, array_like=True, frozen=True):
    """The block hashes of a request in one group, from its first block on. `local_blocks` leading ones are on the GPU."""

    group: int
    hashes: list[bytes]
    local_blocks: int


class Prefetch(Message, frozen=True, tag="Prefetch"):
    """A request arrived: look its blocks up, lease what is in the arena, fetch what `valkey` holds.

    `private`: the domain belongs to one engine process and never leaves the node.
    `tokens_per_second`: the engine's measured prefill rate, 0 = not known yet.
    Answered by one Verdict with the same rid, more follow (same rid) while keys are PENDING.
    """

    request: str
    domain: bytes
    private: bool
    groups: list[GroupKeys]
    tokens_per_second: float


class GroupVerdict(msgspec.Struct, array_like=True, frozen=True):
    """Per key of the GroupKeys, in order: state byte, tier byte, slot (record index) and generation (0 unless HIT)."""

    group: int
    states: bytes
    tiers: bytes
    slots: list[int]
    generations: list[int]


class Verdict(Message, frozen=True, tag="Verdict"):
    """Answer to a Prefetch. `final`: no key is PENDING any more and no further Verdict follows.

    `lease_until_ns`: CLOCK_MONOTONIC nanoseconds until which the HIT slots stay as they are.
    """

    request: str
    final: bool
    lease_until_ns: int
    groups: list[GroupVerdict]


class Release(Message, frozen=True, tag="Release"):
    """The engine reads none of these requests' leased slots any more; pending fetches for them lose their reader."""

    requests: list[str]


# --- stores --------------------------------------------------------------------------------------------------------


class StoreKey(msgspec.Struct, array_like=True, frozen=True):
    """A block to store: `parent` is the hash of the block before it in the same group (b"" for the first)."""

    group: int
    block_hash: bytes
    parent: bytes
    position: int


class Reserve(Message, frozen=True, tag="Reserve"):
    """A worker's copy thread asks for slots of job `job` (vLLM's job id). Every rank of the engine gets equal answers."""

    job: int
    domain: bytes
    private: bool
    keys: list[StoreKey]


class Reserved(Message, frozen=True, tag="Reserved"):
    """Answer to Reserve, per key in order: kind byte (SLOT, EXISTS, FULL), slot and generation (0 unless SLOT).

    `write_until_ns`: CLOCK_MONOTONIC nanoseconds; no copy into these slots may begin later than that.
    """

    job: int
    kinds: bytes
    slots: list[int]
    generations: list[int]
    write_until_ns: int


class Ack(Message, frozen=True, tag="Ack"):
    """This rank has copied its part of every reserved slot of the job."""

    job: int


class Abort(Message, frozen=True, tag="Abort"):
    """This rank copies nothing more into the job's slots; none of them becomes readable (also sent without a Reserved)."""

    job: int


# --- reconnecting --------------------------------------------------------------------------------------------------


class Announce(Message, frozen=True, tag="Announce"):
    """After Welcome. A scheduler names the leased slots that it still reads, as (slot, generation), and for each its request.

    A worker sends empty lists: it has ended every copy before it connects, so the agent may free what it was writing.
    """

    requests: list[str]
    slots: list[int]
    generations: list[int]


class Reannounce(Message, frozen=True, tag="Reannounce"):
    """Pushed: send Announce and, from a scheduler, GpuSnapshot again."""


# --- GPU blocks ----------------------------------------------------------------------------------------------------


class GpuEvents(Message, frozen=True, tag="GpuEvents"):
    """Events of the engine's own cache in their order: kinds "s" stored, "r" removed, "c" cleared (one letter per event).

    hashes: low 8 bytes of the block hash as unsigned integer (0 for "c"); groups: its KV-cache group.
    """

    kinds: str
    groups: list[int]
    hashes: list[int]


class GpuSnapshot(Message, frozen=True, tag="GpuSnapshot"):
    """All blocks that the engine's cache holds now, with the number of physical blocks each; replaces what was known."""

    groups: list[int]
    hashes: list[int]
    counts: list[int]


class EngineLoad(Message, frozen=True, tag="EngineLoad"):
    """What the engine has to do: requests in it, and their prompt tokens that are not computed yet (since 2).

    Several routers send to one engine, and each knows only its own requests.
    """

    requests: int
    prompt_tokens: int


# --- weight file digests -------------------------------------------------------------------------------------------


class FileKey(msgspec.Struct, array_like=True, frozen=True):
    """A file as (device, inode, size, mtime, digest of sampled bytes)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    sample: bytes


class FileDigests(Message, frozen=True, tag="FileDigests"):
    """Asks for remembered content digests; with `digests` not empty, teaches them. Answered by FileDigests (b"" = unknown)."""

    files: list[FileKey]
    digests: list[bytes]


# --- holder <-> agent ----------------------------------------------------------------------------------------------


class HolderHello(Message, frozen=True, tag="HolderHello"):
    """Agent to holder: asks what is kept. Answered by HolderState."""

    boot_id: bytes


class HolderState(Message, frozen=True, tag="HolderState"):
    """Carries 0, 1 (payload) or 2 (payload, table) descriptors. arena_id is b"" when the holder keeps nothing."""

    arena_id: bytes
    capacity_bytes: int
    huge_page_bytes: int
    prefaulted_bytes: int
    has_table: bool


class HolderCreate(Message, frozen=True, tag="HolderCreate"):
    """Agent to holder: make an arena and prefault it; answered by HolderState messages until it is complete."""

    capacity_bytes: int
    huge_page_bytes: int


class HolderKeep(Message, frozen=True, tag="HolderKeep"):
    """Agent to holder, with descriptors: [table], or [payload, table] for a holder that keeps nothing. Answered by HolderState."""

    arena_id: bytes
    capacity_bytes: int
    huge_page_bytes: int
    with_payload: bool


# --- event stream --------------------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """An engine as the router needs it. `domain` is b"" until known; `connected` False: its `gpu` blocks are gone.

    requests, prompt_tokens: its last EngineLoad.
    """

    engine_id: str
    endpoint: str
    dp_rank: int
    served_names: list[str]
    block_size: int
    hash_seed: str
    domain: bytes
    groups: list[GroupLayout]
    connected: bool
    requests: int = 0
    prompt_tokens: int = 0


class TierBlocks(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of one tier: `tier` "gpu" | "ram" | "valkey"; `engine_id` for `gpu`, `domain` for the others; short hashes."""

    tier: str
    engine_id: str
    domain: bytes
    group: int
    hashes: list[int]


class EventsBegin(Message, frozen=True, tag="EventsBegin"):
    """First frame of a stream: a snapshot follows as EventsPart frames, ended by EventsReady; deltas start at seq + 1."""

    boot_id: bytes
    seq: int


class EventsPart(Message, frozen=True, tag="EventsPart"):
    """A piece of the snapshot."""

    engines: list[EngineInfo]
    blocks: list[TierBlocks]


class EventsReady(Message, frozen=True, tag="EventsReady"):
    """The snapshot is complete."""


class EventsDelta(Message, frozen=True, tag="EventsDelta"):
    """Changes in order. `seq` grows by one per frame; a gap or another boot id means: subscribe again.

    `cleared`: all blocks of the engine (`gpu`), or of the domain in the tier; with an empty domain, of every domain.
    """

    boot_id: bytes
    seq: int
    engines: list[EngineInfo]
    stored: list[TierBlocks]
    removed: list[TierBlocks]
    cleared: list[TierBlocks]


class EventsAlive(Message, frozen=True, tag="EventsAlive"):
    """Sent when nothing changed for a while (`seq` of the last delta), so that a silent stream is noticed."""

    boot_id: bytes
    seq: int


EngineMessage = (
    Hello
    | RegisterScheduler
    | RegisterWorker
    | Prefetch
    | Release
    | Reserve
    | Ack
    | Abort
    | Announce
    | GpuEvents
    | GpuSnapshot
    | EngineLoad
    | FileDigests
    | Unmapped
)
AgentMessage = Welcome | Standby | Refused | Domain | Verdict | Reserved | Reannounce | FileDigests
HolderMessage = HolderHello | HolderState | HolderCreate | HolderKeep | Refused
StreamMessage = EventsBegin | EventsPart | EventsReady | EventsDelta | EventsAlive

_encoder = msgspec.msgpack.Encoder()
_from_engine = msgspec.msgpack.Decoder(EngineMessage)
_from_agent = msgspec.msgpack.Decoder(AgentMessage)
_holder = msgspec.msgpack.Decoder(HolderMessage)
_stream = msgspec.msgpack.Decoder(StreamMessage)


def encode(message: Message) -> bytes:
    """A message as one frame; FrameError when it is over the limit."""
    return encode_frame(_encoder.encode(message))


def decode_engine_message(body: bytes) -> EngineMessage:
    """A frame's body as the agent receives it; FrameError names what is wrong."""
    return _decode(_from_engine, body)


def decode_agent_message(body: bytes) -> AgentMessage:
    """A frame's body as an engine receives it; FrameError names what is wrong."""
    return _decode(_from_agent, body)


def decode_holder_message(body: bytes) -> HolderMessage:
    """A frame's body between holder and agent; FrameError names what is wrong."""
    return _decode(_holder, body)


def decode_stream_message(body: bytes) -> StreamMessage:
    """A frame's body of an event stream; FrameError names what is wrong."""
    return _decode(_stream, body)


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise FrameError(f"frame of {len(body)} bytes is not a message of the protocol: {error}") from error


def choose_version(peer_min: int, peer_max: int) -> int | None:
    """The highest version both sides speak, or None."""
    best = min(peer_max, PROTOCOL_VERSION)
    return best if best >= max(peer_min, PROTOCOL_OLDEST) else None
