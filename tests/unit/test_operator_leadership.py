"""Who leads, and that nobody else writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpool_operator.fence import MARGIN_SECONDS, check_before_send, sending_under, write_timeout
from kvpool_operator.kube_errors import NotLeaderError, UnavailableError
from kvpool_operator.leadership import LEASE_SECONDS, RENEW_DEADLINE_SECONDS, Leadership, LeaseRecord, Term
from kvpool_operator.lease import KubeLease
from tests.unit.fake_api_server import fake_api_server


class Clock:
    """Moves when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store:
    """A Lease in memory."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.version = 0
        self.is_down = False
        self.before_answer: Callable[[], None] = lambda: None
        """What happens while a read is under way, before it is answered."""
        self.before_write: Callable[[], None] = lambda: None
        """The same of a renewal."""

    def read(self) -> LeaseRecord | None:
        self.before_answer()
        if self.is_down:
            raise UnavailableError("down")
        return self.record

    def create(self, record: LeaseRecord) -> bool:
        return self.record is None and self._put(record)

    def replace(self, record: LeaseRecord) -> bool:
        self.before_write()
        return self.record is not None and record.version == self.record.version and self._put(record)

    def _put(self, record: LeaseRecord) -> bool:
        self.version += 1
        self.record = replace(record, version=str(self.version))
        return True


def replica(store: Store, clock: Clock, name: str) -> Leadership:
    """One that takes part."""
    times = iter(range(1_000_000))
    return Leadership(
        store, name, on_change=lambda _: None, monotonic=clock, wall_clock=lambda: f"{name} {next(times)}"
    )


def test_first_one_leads_and_the_other_waits_for_its_lease_to_end() -> None:
    store, clock = Store(), Clock()
    first, second = replica(store, clock, "a"), replica(store, clock, "b")

    first.step()
    second.step()
    assert (first.is_leading, second.is_leading) == (True, False)
    clock.now += LEASE_SECONDS - 1
    second.step()
    assert not second.is_leading
    clock.now += 2
    second.step()

    assert (first.is_leading, second.is_leading) == (False, True)


def test_lease_that_is_renewed_is_never_taken() -> None:
    store, clock = Store(), Clock()
    first, second = replica(store, clock, "a"), replica(store, clock, "b")
    for _ in range(50):
        first.step()
        second.step()
        clock.now += 2

    assert not second.is_leading


def test_deadline_ends_well_before_others_may_lead() -> None:
    store, clock = Store(), Clock()
    leader = replica(store, clock, "a")
    leader.step()

    clock.now += RENEW_DEADLINE_SECONDS

    assert not leader.is_leading
    assert RENEW_DEADLINE_SECONDS + 3 <= LEASE_SECONDS


def test_leader_that_was_stopped_sees_that_another_one_leads() -> None:
    store, clock = Store(), Clock()
    first, second = replica(store, clock, "a"), replica(store, clock, "b")
    first.step()
    second.step()
    clock.now += LEASE_SECONDS + 1
    second.step()

    assert not first.is_leading  # before it did anything at all
    first.step()

    assert (first.is_leading, second.is_leading) == (False, True)


def test_standbys_clock_runs_from_the_answer_that_shows_a_renewal() -> None:
    """Its request was on the way for long, and the leader renewed just before it was answered."""
    store, clock = Store(), Clock()
    first, second = replica(store, clock, "a"), replica(store, clock, "b")
    first.step()
    second.step()

    def delayed() -> None:
        store.before_answer = lambda: None
        clock.now += 14
        first.step()

    store.before_answer = delayed
    second.step()
    clock.now += RENEW_DEADLINE_SECONDS - 0.1
    second.step()

    assert (first.is_leading, second.is_leading) == (True, False)


@pytest.mark.parametrize(("is_write_slow", "seconds_left"), [(True, 5), (False, 15)])
def test_leaders_time_runs_from_the_start_of_its_renewal(*, is_write_slow: bool, seconds_left: float) -> None:
    store, clock = Store(), Clock()
    leader = replica(store, clock, "a")
    leader.step()

    def delayed() -> None:
        clock.now += 10

    if is_write_slow:
        store.before_write = delayed
    else:
        store.before_answer = delayed
    leader.step()

    clock.now += seconds_left - 0.1
    assert leader.is_leading
    clock.now += 0.2
    assert not leader.is_leading


def test_term_that_ended_never_opens_again() -> None:
    """What a thread began in it is not to be sent in the next one: others may have led between."""
    store, clock = Store(), Clock()
    terms: list[Term | None] = []
    leader = Leadership(store, "a", on_change=terms.append, monotonic=clock, wall_clock=lambda: str(clock.now))
    leader.step()
    leader._tell()
    clock.now += RENEW_DEADLINE_SECONDS + 1
    leader.step()
    leader._tell()

    first, second = terms
    assert first is not None
    assert second is not None
    assert (first.is_open, second.is_open) == (False, True)


def test_only_one_of_two_takes_a_free_lease() -> None:
    store, clock = Store(), Clock()
    store.create(LeaseRecord(holder=""))
    first, second = replica(store, clock, "a"), replica(store, clock, "b")
    stale = store.record
    first.step()
    assert stale is not None
    assert not store.replace(replace(stale, holder="b"))
    second.step()

    assert (first.is_leading, second.is_leading) == (True, False)


def test_lease_let_go_is_free_at_once() -> None:
    store, clock = Store(), Clock()
    told: list[bool] = []
    first = Leadership(
        store, "a", on_change=lambda term: told.append(term is not None), monotonic=clock, wall_clock=lambda: "t"
    )
    thread = threading.Thread(target=first.run)
    thread.start()
    while not told:
        pass
    first.stop()
    thread.join(10)
    second = replica(store, clock, "b")
    second.step()

    assert second.is_leading
    assert told == [True, False]


def test_restarted_replica_goes_on_with_its_own_lease() -> None:
    store, clock = Store(), Clock()
    replica(store, clock, "a").step()

    again = replica(store, clock, "a")
    again.step()

    assert again.is_leading


def test_lease_object_of_the_api_server_is_written_with_its_version() -> None:
    with fake_api_server() as api:
        store = KubeLease(api.kube(), "kvpool-system", "kvpool-operator")
        assert store.read() is None
        assert store.create(LeaseRecord(holder="a", renewed="2026-01-01T00:00:00.000000Z"))
        assert not store.create(LeaseRecord(holder="b"))
        read = store.read()
        assert read is not None
        assert (read.holder, read.duration_seconds) == ("a", LEASE_SECONDS)

        assert store.replace(replace(read, holder="b"))
        assert not store.replace(replace(read, holder="c"))


# --- the fence ------------------------------------------------------------------------------------------------------


class Gate:
    """A fence that tests shut."""

    seconds = 100.0

    def remaining_seconds(self) -> float:
        return self.seconds


def test_write_ends_before_the_fence_does() -> None:
    gate = Gate()
    gate.seconds = 3.0

    assert write_timeout(gate, 8.0) == 3.0 - MARGIN_SECONDS
    gate.seconds = MARGIN_SECONDS
    with pytest.raises(NotLeaderError):
        write_timeout(gate, 8.0)


def test_thread_stopped_between_beginning_and_sending_sends_nothing() -> None:
    gate = Gate()
    with sending_under(gate):
        check_before_send()
        gate.seconds = -1.0
        with pytest.raises(NotLeaderError):
            check_before_send()
    check_before_send()


def test_no_byte_of_a_write_leaves_a_connection_whose_fence_shut_meanwhile() -> None:
    """As a thread that is stopped while it connects: the fence is open when the write begins, shut when it is sent."""

    class Shutting(Gate):
        asked = 0

        def remaining_seconds(self) -> float:
            self.asked += 1
            return 100.0 if self.asked == 1 else -1.0

    with fake_api_server() as api:
        kube = api.kube(Shutting())

        with pytest.raises(NotLeaderError):
            kube.create({"kind": "ConfigMap", "metadata": {"namespace": "n", "name": "x"}})

        assert api.writes == []
        assert kube.get("ConfigMap", "n", "x") is None  # reading needs no leadership
