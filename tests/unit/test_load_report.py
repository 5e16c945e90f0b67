"""What an engine tells routers of its load, through its agent."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_core import wire
from kvpool_vllm.load_report import REPORT_SECONDS, LoadReport


@dataclass
class Request:
    """What is read of vLLM's."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    finished: bool = False

    def is_finished(self) -> bool:
        return self.finished


class Told:
    """Where reports go."""

    def __init__(self, *requests: Request) -> None:
        self.loads: list[tuple[int, int]] = []
        self.connected = True
        self.report_ = LoadReport()
        for request in requests:
            self.report_.began(request)

    def report(self, now: float) -> None:
        """A moment at which something may be told."""
        self.report_.report(self._send, now=now)

    def _send(self, message: wire.Message) -> bool:
        assert isinstance(message, wire.EngineLoad)
        if self.connected:
            self.loads.append((message.requests, message.prompt_tokens))
        return self.connected


def test_more_to_do_is_told_when_it_changed_and_not_too_often() -> None:
    told = Told(Request("a", 100), Request("b", 50, 20))
    told.report(0.0)
    told.report(1.0)
    assert told.loads == [(2, 130)]
    told.report_.began(Request("c", 10))
    told.report(1.0)
    told.report_.began(Request("d", 10))
    told.report(1.0 + REPORT_SECONDS / 2)
    assert told.loads == [(2, 130), (3, 140)]
    told.report(1.0 + REPORT_SECONDS)
    assert told.loads[-1] == (4, 150)


def test_less_to_do_is_told_at_once() -> None:
    first, second = Request("a", 100), Request("b", 50)
    told = Told(first, second)
    told.report(0.0)
    first.num_computed_tokens = 64
    told.report(0.0)
    assert told.loads == [(2, 150)], "a part of a prompt is no news worth a message"
    first.num_computed_tokens, second.num_computed_tokens = 120, 50
    told.report(0.0)
    told.report_.ended(first)
    told.report(0.0)
    told.report_.ended(second)
    told.report(0.0)
    assert told.loads == [(2, 150), (2, 0), (1, 0), (0, 0)]


def test_a_load_that_could_not_be_told_is_told_later_and_a_new_agent_is_told_everything() -> None:
    told = Told(Request("a", 10))
    told.connected = False
    told.report(0.0)
    told.connected = True
    told.report(0.0)
    told.report_.forget()
    told.report(0.0)
    assert told.loads == [(1, 10), (1, 10)]


def test_a_preempted_request_has_its_prompt_left_again() -> None:
    request = Request("a", 100)
    told = Told(request)
    told.report(0.0)
    request.num_computed_tokens = 100
    told.report(0.0)
    request.num_computed_tokens = 0
    told.report(REPORT_SECONDS)
    assert told.loads == [(1, 100), (1, 0), (1, 100)]


def test_a_request_of_whose_end_nobody_told_counts_no_more() -> None:
    request = Request("a", 100)
    told = Told(request)
    told.report(0.0)
    request.finished = True
    told.report(REPORT_SECONDS)
    told.report_.ended(request)
    told.report(2 * REPORT_SECONDS)
    assert told.loads == [(1, 100), (0, 0)]


class CountedRequest(Request):
    """Counts how often it is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "num_computed_tokens":
            CountedRequest.looks += 1
        return super().__getattribute__(name)


def test_arrivals_and_ends_do_not_look_at_every_other_request() -> None:
    count = 500
    requests = [CountedRequest(str(number), 100) for number in range(count)]
    told = Told()
    CountedRequest.looks = 0
    for request in requests:
        told.report_.began(request)
        told.report(0.0)
    told.report(REPORT_SECONDS)
    for request in requests:
        told.report_.ended(request)
        told.report(REPORT_SECONDS)
    assert told.loads[-count - 1 :] == [(left, left * 100) for left in range(count, -1, -1)]
    assert CountedRequest.looks < 10 * count
