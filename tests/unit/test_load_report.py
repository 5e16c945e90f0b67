"""What an engine tells routers of its load, through its agent."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_core import wire
from kvpool_vllm.load_report import REPORT_SECONDS, LoadReport


@dataclass
class Request:
    """What is read of vLLM's."""

    num_prompt_tokens: int
    num_computed_tokens: int = 0


class Told:
    """Where reports go."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int]] = []
        self.connected = True

    def send(self, message: wire.Message) -> bool:
        """As the client's."""
        assert isinstance(message, wire.EngineLoad)
        if self.connected:
            self.loads.append((message.requests, message.prompt_tokens))
        return self.connected


def test_a_load_is_told_when_it_changed_and_not_too_often() -> None:
    told, report, requests = Told(), LoadReport(), [Request(100), Request(50, 20)]
    report.report(lambda: requests, told.send, now=0.0)
    report.report(lambda: requests, told.send, now=1.0)
    assert told.loads == [(2, 130)]
    requests[0].num_computed_tokens = 120  # an answer is being generated: its prompt is done
    report.report(lambda: requests, told.send, now=1.0)
    requests.clear()
    report.report(lambda: requests, told.send, now=1.0 + REPORT_SECONDS / 2)
    assert told.loads == [(2, 130), (2, 30)]
    report.report(lambda: requests, told.send, now=1.0 + REPORT_SECONDS)
    assert told.loads[-1] == (0, 0)


def test_a_load_that_could_not_be_told_is_told_later_and_a_new_agent_is_told_everything() -> None:
    told, report, requests = Told(), LoadReport(), [Request(10)]
    told.connected = False
    report.report(lambda: requests, told.send, now=0.0)
    told.connected = True
    report.report(lambda: requests, told.send, now=0.0)
    report.forget()
    report.report(lambda: requests, told.send, now=0.0)
    assert told.loads == [(1, 10), (1, 10)]
