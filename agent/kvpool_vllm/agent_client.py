"""The connection of one engine process to the agent: one I/O thread, full duplex, reconnecting.

Invariant: no method waits for the agent on the caller's thread except `request`, which only copy threads use. An agent
that is absent, hung or restarted shows as `connected` being False or as a request without an answer, nothing else.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from kvpool_core import wire
from kvpool_core.errors import KVPoolError, ProtocolError
from kvpool_core.frames import FrameDecoder
from kvpool_vllm.backoff import Backoff

logger = logging.getLogger("vllm.kvpool")

CONNECT_TIMEOUT_SECONDS = 2.0
WELCOME_TIMEOUT_SECONDS = 5.0
MAX_QUEUED_BYTES = 32 * 1024 * 1024
"""What an agent that does not read may leave queued; beyond it the connection is given up."""
IDLE_SECONDS = 0.25
_READ_BYTES = 256 * 1024


class Peer(Protocol):
    """The owner of a client. Its methods are called on the client's thread and must not wait but where they say so."""

    def hello(self) -> wire.Hello:
        """The greeting; read anew at each connect."""

    def on_welcome(self, welcome: wire.Welcome, descriptors: Sequence[int]) -> list[wire.Message]:
        """Takes ownership of the descriptors; returns what is to be sent first."""

    def on_connected(self) -> None:
        """From here on `send` reaches the agent, behind what `on_welcome` returned."""

    def on_standby(self, standby: wire.Standby) -> list[wire.Message]:
        """The agent has no arena to give yet; returns the answer. May wait until copies in flight have ended."""

    def on_refused(self, refused: wire.Refused) -> None:
        """The agent lets this process not in."""

    def on_absent(self, seconds: float) -> None:
        """Another try to reach the agent failed, so long after the connection was lost. May wait like `on_standby`."""

    def on_message(self, message: wire.AgentMessage) -> None:
        """A pushed message or an answer that no `request` waits for."""

    def on_idle(self) -> None:
        """Nothing was received for IDLE_SECONDS; the connection stands."""

    def on_disconnected(self) -> None:
        """The connection is gone; every answer not yet received is lost."""


class AgentClient:
    """One connection to the agent's socket."""

    def __init__(self, socket_path: str, peer: Peer, *, name: str) -> None:
        self._path = socket_path
        self._peer = peer
        self._name = name
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._outgoing: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._waiting: dict[int, _Answer] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = False
        self._said_absent = False
        self._lost_at = time.monotonic()
        self.connected = False
        self.last_heard = 0.0
        """time.monotonic() of the last frame received."""
        self._thread = threading.Thread(target=self._run, name=f"kvpool-{name}", daemon=True)

    def start(self) -> None:
        """Begin connecting in the background."""
        self._thread.start()

    def next_id(self) -> int:
        """A request id of this process."""
        return next(self._ids)

    def send(self, message: wire.Message) -> bool:
        """Hand a message to the socket without waiting; False when there is no connection."""
        frame = memoryview(wire.encode(message))
        with self._lock:
            return self._enqueue(frame)

    def request(self, message: wire.Message, *, timeout_seconds: float) -> object | None:
        """Send and wait for the answer with the same id; None when it does not come in time, or on a lost connection."""
        answer = _Answer()
        with self._lock:
            self._waiting[message.rid] = answer
        try:
            if not self.send(message):
                return None
            answer.done.wait(timeout_seconds)
            return answer.message
        finally:
            with self._lock:
                self._waiting.pop(message.rid, None)

    def close(self) -> None:
        """End the connection and the thread; the process keeps its mappings."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    # --- the client's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing:
            began, stood_seconds = time.monotonic(), 0.0
            try:
                if self._serve_once():
                    self._lost_at = time.monotonic()
                    stood_seconds = self._lost_at - began
            except (OSError, KVPoolError) as error:
                self._say_absent(error)
            except Exception as error:  # noqa: BLE001 whatever it was, the engine goes on and so does the thread
                self._say_absent(error, unexpected=True)
            self._drop()
            if not self._closing:
                self._tell_absent()
                self._sleep(backoff.after(stood_seconds, random.random()))

    def _tell_absent(self) -> None:
        try:
            self._peer.on_absent(time.monotonic() - self._lost_at)
        except Exception:
            logger.exception("kvpool: %s could not act on its agent's absence", self._name)

    def _serve_once(self) -> bool:
        """One connection from connect to loss; True when it had been welcomed."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(CONNECT_TIMEOUT_SECONDS)
            sock.connect(self._path)
            sock.sendall(wire.encode(self._peer.hello()))
            decoder = FrameDecoder()
            welcome, early = self._await_welcome(sock, decoder)
            sock.setblocking(False)
            with self._lock:
                self._socket = sock
                for message in welcome:
                    self._enqueue(memoryview(wire.encode(message)))
                self.connected = True
                self.last_heard = time.monotonic()
            logger.info("kvpool: %s is connected to the agent at %s", self._name, self._path)
            self._said_absent = False
            self._peer.on_connected()
            for body in early:
                self._dispatch(body)
            try:
                self._pump(sock, decoder)
            except (OSError, KVPoolError) as error:
                self._say_absent(error)
            return True

    def _await_welcome(self, sock: socket.socket, decoder: FrameDecoder) -> tuple[list[wire.Message], list[bytes]]:
        """Wait as long as the agent says that it has no arena yet; what to send first, and frames behind the Welcome."""
        sock.settimeout(WELCOME_TIMEOUT_SECONDS)
        descriptors: list[int] = []
        try:
            while True:
                bodies = self._receive_greeting(sock, decoder, descriptors)
                for number, body in enumerate(bodies, 1):
                    message = wire.decode_agent_message(body)
                    if isinstance(message, wire.Standby):
                        self._stand_by(sock, message)
                        continue
                    if not isinstance(message, wire.Welcome) or len(descriptors) != 2:
                        raise self._not_welcomed(message)
                    owned, descriptors = descriptors, []
                    return self._peer.on_welcome(message, owned), bodies[number:]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive_greeting(self, sock: socket.socket, decoder: FrameDecoder, descriptors: list[int]) -> list[bytes]:
        data, fds, _flags, _address = socket.recv_fds(sock, _READ_BYTES, 2)
        descriptors += fds
        if not data:
            raise ProtocolError(f"the agent at {self._path} closed the connection before its Welcome")
        return list(decoder.feed(data))

    def _stand_by(self, sock: socket.socket, standby: wire.Standby) -> None:
        if not self._said_absent:
            self._said_absent = True
            logger.info("kvpool: %s waits for the agent at %s: %s", self._name, self._path, standby.reason)
        for answer in self._peer.on_standby(standby):
            sock.sendall(wire.encode(answer))

    def _not_welcomed(self, message: wire.AgentMessage) -> ProtocolError:
        if isinstance(message, wire.Refused):
            self._peer.on_refused(message)
            return ProtocolError(f"the agent at {self._path} refused this engine: {message.code}: {message.message}")
        return ProtocolError(f"the agent at {self._path} answered Hello with {type(message).__name__}")

    def _pump(self, sock: socket.socket, decoder: FrameDecoder) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._closing:
                with self._lock:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
                    if self._socket is None:
                        raise ProtocolError(f"{self._queued_bytes} bytes queued: the agent does not read")
                selector.modify(sock, wanted)
                ready = selector.select(IDLE_SECONDS)
                if not ready:
                    self._peer.on_idle()
                for key, events in ready:
                    if key.fd == self._wake_read:
                        self._take_wakes()
                    elif events & selectors.EVENT_READ and not self._read(sock, decoder):
                        raise ProtocolError("the agent closed the connection")
                with self._lock:
                    self._flush()

    def _read(self, sock: socket.socket, decoder: FrameDecoder) -> bool:
        try:
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        self.last_heard = time.monotonic()
        for body in decoder.feed(data):
            self._dispatch(body)
        return bool(data)

    def _dispatch(self, body: bytes) -> None:
        message = wire.decode_agent_message(body)
        if isinstance(message, wire.Refused):
            raise ProtocolError(f"the agent refused: {message.code}: {message.message}")
        with self._lock:
            answer = self._waiting.pop(message.rid, None) if message.rid else None
        if answer is not None:
            answer.message = message
            answer.done.set()
        else:
            self._peer.on_message(message)

    def _drop(self) -> None:
        with self._lock:
            was_connected, self.connected = self.connected, False
            self._socket = None
            self._outgoing.clear()
            self._queued_bytes = 0
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for answer in waiting:
            answer.done.set()
        if was_connected:
            self._peer.on_disconnected()

    # --- sending (callers hold the lock) --------------------------------------------------------------------------

    def _enqueue(self, frame: memoryview) -> bool:
        if self._socket is None:
            return False
        if self._queued_bytes + len(frame) > MAX_QUEUED_BYTES:
            self._socket = None
            self._wake()
            return False
        self._outgoing.append(frame)
        self._queued_bytes += len(frame)
        self._flush()
        if self._outgoing:
            self._wake()
        return True

    def _flush(self) -> None:
        while self._outgoing and self._socket is not None:
            try:
                sent = self._socket.send(self._outgoing[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # the reader sees the same loss and reconnects
                self._queued_bytes = 0
                return
            self._queued_bytes -= sent
            if sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][sent:]

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _take_wakes(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _sleep(self, seconds: float) -> None:
        """Until `close`: what else woke the thread was for a connection that is lost, and would keep it from sleeping."""
        self._take_wakes()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            if not self._closing:
                selector.select(seconds)

    def _say_absent(self, error: BaseException, *, unexpected: bool = False) -> None:
        if not self._said_absent and not self._closing:
            self._said_absent = True
            logger.warning(
                "kvpool: %s has no agent at %s (%s); serving without the cache, trying again",
                self._name,
                self._path,
                repr(error) if unexpected else error,
                exc_info=error if unexpected else None,
            )


class _Answer:
    """Where a waiting thread finds its answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.message: object | None = None
