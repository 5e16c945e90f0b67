"""What the connector keeps of a request goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_vllm.tracked_requests import TrackedRequests


@dataclass
class Request:
    """What is read of vLLM's."""

    request_id: str = "r"
    finished: bool = False

    def is_finished(self) -> bool:
        return self.finished


@dataclass
class Lookup:
    """What is read of a lookup."""

    rid: int
    request_id: str = "r"
    loading: bool = False


def tracked(request: Request | None = None) -> TrackedRequests[Lookup]:
    requests: TrackedRequests[Lookup] = TrackedRequests()
    requests.begin(request or Request())
    return requests


def is_empty(requests: TrackedRequests[Lookup]) -> bool:
    return not len(requests) and not list(requests.lookups()) and requests.asked(1) is None


def test_nothing_is_left_of_a_request_that_ended() -> None:
    requests, lookup = tracked(), Lookup(1)
    requests.ask(lookup)
    assert requests.asked(1) is requests.lookup("r") is lookup
    assert requests.end("r") is lookup
    requests.close(lookup)
    assert is_empty(requests)


def test_lookup_of_a_load_in_flight_outlives_its_request() -> None:
    requests, lookup = tracked(), Lookup(1, loading=True)
    requests.ask(lookup)
    assert requests.end("r") is None
    assert requests.lookup("r") is lookup
    requests.close(lookup)
    assert is_empty(requests)


def test_failure_is_remembered_until_the_request_ends() -> None:
    requests = tracked()
    requests.fail("r")
    assert requests.has_failed("r")
    requests.end("r")
    assert not requests.has_failed("r")


def test_load_that_fails_after_its_request_ended_leaves_nothing() -> None:
    """vLLM reports the load of an aborted request when the workers have ended it."""
    requests = tracked()
    requests.end("r")
    requests.fail("r")
    requests.begin(Request())
    assert not requests.has_failed("r")


def test_answer_to_a_closed_question_is_of_no_interest() -> None:
    requests, lookup = tracked(), Lookup(1)
    requests.ask(lookup)
    requests.close_question(lookup)
    assert requests.asked(1) is None
    assert requests.lookup("r") is lookup


def test_closing_a_former_lookup_leaves_the_present_one() -> None:
    requests, former, present = tracked(), Lookup(1), Lookup(2)
    requests.ask(former)
    requests.ask(present)
    requests.close(former)
    assert requests.lookup("r") is requests.asked(2) is present


def test_request_of_whose_end_nobody_tells_is_dropped() -> None:
    request = Request()
    requests = tracked(request)
    assert [requests.drop_finished() for _ in range(2)] == [[], []]
    request.finished = True
    assert requests.drop_finished() == [], "its end may be told with the next step"
    assert requests.drop_finished() == ["r"]
