"""The endpoints that exist, whether each is up, and which models it serves.

Invariant: an endpoint is `up` only if its last contact succeeded, or too few probes in a row went unanswered. One whose last
probes all went unanswered is `silent`, whether it was up before or never: overloaded or hung, so it is used only while none is up.
State only; probing is in `health.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvpool_router.discovery import EndpointSpec


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model or adapter of an endpoint. `lora`: name and path of an adapter, which enter its block hashes."""

    name: str
    lora: tuple[str, str] | None
    raw: msgspec.Raw


@dataclass(slots=True, eq=False)
class EndpointState:
    """One endpoint. `models` is None until it was asked once."""

    spec: EndpointSpec
    up: bool = False
    silent: bool = False
    unanswered: int = 0
    problem: str = "not probed yet"
    models: dict[str, ModelCard] | None = None

    @property
    def address(self) -> str:
        """`host:port`, its name in logs, metrics and headers."""
        return self.spec.address


class EndpointTable:
    """All endpoints by address."""

    def __init__(self, probe_failures: int) -> None:
        self._probe_failures = probe_failures
        self._endpoints: dict[str, EndpointState] = {}

    def all(self) -> list[EndpointState]:
        """Every endpoint, up or not."""
        return list(self._endpoints.values())

    def get(self, address: str) -> EndpointState | None:
        """The endpoint of that address."""
        return self._endpoints.get(address)

    def replace(self, specs: Sequence[EndpointSpec]) -> tuple[list[EndpointState], list[EndpointState]]:
        """Take over a complete set; those that are new and those that are gone. A changed one is both.

        One that goes with probes unanswered (a hung engine's pod is not Ready any more) is silent for the requests that it has:
        nobody probes it again.
        """
        wanted = {spec.address: spec for spec in specs}
        gone = [state for state in self.all() if wanted.get(state.address) != state.spec]
        for state in gone:
            state.up, state.silent = False, state.silent or state.unanswered > 0
            del self._endpoints[state.address]
        new = [EndpointState(spec) for spec in specs if spec.address not in self._endpoints]
        self._endpoints.update({state.address: state for state in new})
        return new, gone

    def mark_up(self, state: EndpointState) -> bool:
        """A probe succeeded; True when the endpoint was down."""
        was_up = state.up
        state.up, state.silent, state.unanswered, state.problem = True, False, 0, ""
        return not was_up

    def mark_down(self, state: EndpointState, problem: str) -> bool:
        """It refused, or said that it is not well; True when it was up."""
        was_up = state.up
        state.up, state.silent, state.unanswered, state.problem = False, False, 0, problem
        return was_up

    def mark_unanswered(self, state: EndpointState, problem: str) -> bool:
        """A probe got no answer in time; True when that made the endpoint silent."""
        state.unanswered += 1
        if state.silent or state.unanswered < self._probe_failures:
            return False
        state.up, state.silent, state.problem = False, True, problem
        return True

    def usable(self, states: Sequence[EndpointState]) -> list[EndpointState]:
        """Those that may get requests: the silent ones only where none is up."""
        up = [state for state in states if state.up]
        return up or [state for state in states if state.silent]

    def any_usable(self) -> bool:
        """Whether any request can be served."""
        return any(state.up or state.silent for state in self._endpoints.values())
