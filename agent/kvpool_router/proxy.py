"""The OpenAI-compatible proxy: one request in, one engine's answer out, byte for byte.

Invariant: a request reaches a second engine only while no byte of an answer has reached the client and the first one's
connection failed; every answer carries the route header.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send
from yarl import URL

from kvpool_router.asgi import (
    BodyTooLargeError,
    BodyTooSlowError,
    ClientLeftError,
    read_body,
    send_json,
    send_piece,
    send_start,
    until_client_leaves,
)
from kvpool_router.body_room import BodyRoom, BodyShare, NoRoomError
from kvpool_router.config import RouterConfig
from kvpool_router.endpoints import EndpointState, EndpointTable
from kvpool_router.health import HealthMonitor
from kvpool_router.load import Charge, LoadBook
from kvpool_router.logs import fields
from kvpool_router.metrics import RouterMetrics
from kvpool_router.picker import Picker, Plan, Route
from kvpool_router.reasons import BAD_REQUEST, LOAD, NO_ENDPOINT, RETRY, ROUTER_FULL, UPSTREAM_FAILED
from kvpool_router.request_body import BodyError, RequestBody
from kvpool_router.route_header import ROUTE_HEADER, format_refusal, format_route
from kvpool_router.upstream import (
    BROKEN,
    LATE,
    REFUSED,
    SILENT,
    UpstreamAnswer,
    UpstreamError,
    forwarded_headers,
    open_upstream,
)

log = logging.getLogger(__name__)

_RANK_HEADER = b"x-data-parallel-rank"
_ROUTE_HEADER = ROUTE_HEADER.encode()


@dataclass(frozen=True, slots=True)
class ProxyParts:
    """What the proxy works with."""

    config: RouterConfig
    session: aiohttp.ClientSession
    table: EndpointTable
    health: HealthMonitor
    picker: Picker
    book: LoadBook
    bodies: BodyRoom
    metrics: RouterMetrics


class BrokenAnswerError(Exception):
    """Raised to the server, so that it closes the client's connection instead of ending the answer as if whole."""


class RefusedRequestError(Exception):
    """The router answers this request itself."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(slots=True)
class _Exchange:
    """One request on its way. `cause`: what the endpoint before did wrong, "" at the first attempt.

    silent: targets left for their silence, to be asked once more where they are up again; None when they were.
    """

    scope: Scope
    send: Send
    share: BodyShare
    started: float
    plan: Plan
    tried: set[str] = field(default_factory=set)
    silent: dict[str, EndpointState | None] = field(default_factory=dict)
    repeated: bool = False
    reason: str = NO_ENDPOINT
    code: int = 0
    cause: str = ""

    @property
    def barred(self) -> set[str]:
        """Targets that do not get the request now."""
        return {name for name in self.tried if (state := self.silent.get(name)) is None or not state.up}

    def let_go_of_body(self) -> None:
        """An answer began, so no other engine gets the request: answers may take long, the body's memory is free."""
        self.plan.body = replace(self.plan.body, forwarded=b"")
        self.share.give_back()


class CompletionRoute:
    """A POST route that forwards to the best endpoint. `by_load`: the prompt plays no part. `charged`: it is work."""

    def __init__(self, parts: ProxyParts, *, by_load: bool = False, charged: bool = True) -> None:
        self._parts = parts
        self._by_load = by_load
        self._charged = charged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            with self._parts.bodies.share() as share:
                config = self._parts.config
                seconds = config.timeouts.body_seconds
                raw = await read_body(receive, max_bytes=config.max_body_bytes, seconds=seconds, share=share)
                started = time.monotonic()
                async with until_client_leaves(receive):
                    body = await self._parse(scope, raw)
                    del raw
                    plan = await self._plan(scope, body)
                    del body
                    await self._serve(_Exchange(scope, send, share, started, plan))
        except ClientLeftError:
            log.debug("the client left")
        except BodyTooLargeError as error:
            await self._refuse(send, RefusedRequestError(413, BAD_REQUEST, f"{error}; send a shorter prompt"))
        except BodyTooSlowError as error:
            await self._refuse(send, RefusedRequestError(408, BAD_REQUEST, f"{error}; send it again"))
        except NoRoomError as error:
            await self._refuse(send, RefusedRequestError(503, ROUTER_FULL, f"{error}; try again shortly"))
        except RefusedRequestError as error:
            await self._refuse(send, error)

    # --- the way of a request -----------------------------------------------------------------------------------

    async def _plan(self, scope: Scope, body: RequestBody) -> Plan:
        """The plan, without the prompt's text: what is left to do needs only its tokens."""
        plan = await self._parts.picker.plan(
            body, authorization=_header(scope, b"authorization"), by_load=self._by_load
        )
        if not self._by_load:
            self._parts.metrics.tokenizations.labels(plan.why_not or "known").inc()
        plan.body = replace(body, prompt=None)
        return plan

    async def _serve(self, exchange: _Exchange) -> None:
        try:
            while (route := self._choose(exchange)) is not None:
                if await self._attempt(exchange, route):
                    return
        except asyncio.CancelledError:
            self._count(exchange.reason, 0)
            raise
        raise _refusal(exchange)

    def _choose(self, exchange: _Exchange) -> Route | None:
        route = self._parts.picker.choose(exchange.plan, now=time.monotonic(), without=exchange.barred)
        if route is None:
            return None
        if route.target.name in exchange.silent:
            exchange.silent[route.target.name] = None
        if exchange.cause:
            self._parts.metrics.retries.labels(exchange.cause).inc()
        else:
            self._parts.metrics.route_seconds.observe(time.monotonic() - exchange.started)
            self._count_expected(route)
        exchange.reason = RETRY if exchange.cause else route.reason
        return route

    async def _attempt(self, exchange: _Exchange, route: Route) -> bool:
        """Forward to one target; False when another may be tried."""
        charge = self._start(exchange.plan, route)
        try:
            answer = await self._open_unless_silent(exchange, route)
            exchange.let_go_of_body()
            self._begun(route, charge)
            await self._relay(exchange, route, answer)
            return True
        except UpstreamError as error:
            await self._failed(exchange, route, error)
            return False
        finally:
            self._parts.book.end(charge)

    def _start(self, plan: Plan, route: Route) -> Charge:
        self._parts.picker.assume_held(route, now=time.monotonic())
        score, name = route.choice.score, route.target.name
        measured = self._parts.book.tokens_per_second(name)
        left = score.left_tokens if self._charged else 0
        return self._parts.book.start(
            name,
            left_tokens=left,
            cold=plan.tokens is not None and not plan.why_not and route.blocks.total == 0,
            streaming=plan.body.streaming,
            now=time.monotonic(),
            prefill_seconds=left / measured if measured else None,
        )

    def _begun(self, route: Route, charge: Charge) -> None:
        """The first byte is there: the prompt is computed, and what was assumed holds for a while longer."""
        now = time.monotonic()
        self._parts.book.first_byte(charge, now=now)
        if now - charge.started > self._parts.config.index.speculative_seconds / 2:
            self._parts.picker.assume_held(route, now=now)

    async def _open_unless_silent(self, exchange: _Exchange, route: Route) -> UpstreamAnswer:
        """Wait for the answer as long as the engine shows signs of life, or no other can take the request."""
        opening = asyncio.create_task(self._open(exchange, route))
        try:
            while not (await asyncio.wait({opening}, timeout=self._parts.config.timeouts.probe_interval_seconds))[0]:
                if route.target.endpoint.silent and self._is_another_up(exchange, route):
                    raise UpstreamError("no sign of life, and another endpoint is up", cause=SILENT)
            return opening.result()
        except BaseException:
            await _discard(opening)
            raise

    def _is_another_up(self, exchange: _Exchange, route: Route) -> bool:
        barred = exchange.barred | {route.target.name}
        another = self._parts.picker.choose(exchange.plan, now=time.monotonic(), without=barred)
        return another is not None and another.target.endpoint.up

    async def _open(self, exchange: _Exchange, route: Route) -> UpstreamAnswer:
        rank = route.target.dp_rank
        dropped = {self._parts.config.tenancy.header.lower().encode(), _ROUTE_HEADER}
        if rank is not None:
            dropped.add(_RANK_HEADER)
        headers = forwarded_headers(exchange.scope["headers"], dropped=dropped)
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        url = _upstream_url(route.target.endpoint.spec.url, exchange.scope)
        body = exchange.plan.body.forwarded
        timeouts = self._parts.config.timeouts
        silence = timeouts.idle_seconds if exchange.plan.body.streaming else timeouts.whole_answer_seconds
        return await open_upstream(
            self._parts.session, url, method="POST", headers=headers, body=body, silence_seconds=silence
        )

    async def _relay(self, exchange: _Exchange, route: Route, answer: UpstreamAnswer) -> None:
        """Pass the answer through; BrokenAnswerError when the engine breaks it off."""
        now = time.monotonic()
        self._parts.metrics.first_byte_seconds.observe(now - exchange.started)
        header = (_ROUTE_HEADER, format_route(route, exchange.reason).encode())
        exchange.code = answer.response.status
        try:
            await send_start(exchange.send, exchange.code, [*answer.headers(), header])
            piece = answer.first
            while piece:
                await send_piece(exchange.send, piece, more=True)
                piece = await answer.next_piece()
            await send_piece(exchange.send, b"", more=False)
        except UpstreamError as error:
            self._parts.metrics.broken_answers.inc()
            log.warning("answer broke off", extra=fields(endpoint=route.target.name, detail=str(error)))
            raise BrokenAnswerError(str(error)) from error
        finally:
            answer.response.close()
        self._count(exchange.reason, exchange.code)

    async def _failed(self, exchange: _Exchange, route: Route, error: UpstreamError) -> None:
        """An engine gave no answer: once more at most for this request, if it is well and no other is left or it was silent."""
        endpoint, name = route.target.endpoint, route.target.name
        log.debug("endpoint failed a request", extra=fields(endpoint=name, detail=str(error)))
        exchange.cause = error.cause
        exchange.tried.add(name)
        if error.cause == REFUSED:
            self._parts.health.mark_down(endpoint, str(error))
            return
        if error.cause == SILENT:
            exchange.silent.setdefault(name, endpoint)
            return
        if error.cause == LATE:
            raise RefusedRequestError(504, UPSTREAM_FAILED, f"the engine at {name} gave no answer: {error}")
        well = await self._parts.health.probe(endpoint)
        alternatives = self._parts.picker.choose(exchange.plan, now=time.monotonic(), without=exchange.barred)
        if well and alternatives is None and not exchange.repeated:
            exchange.repeated = True
            exchange.tried.discard(name)

    # --- edges --------------------------------------------------------------------------------------------------

    async def _parse(self, scope: Scope, raw: bytes) -> RequestBody:
        tenancy = self._parts.config.tenancy
        tenant = _header(scope, tenancy.header.lower().encode()) or ""
        if not tenant and tenancy.missing == "Reject":
            raise RefusedRequestError(400, BAD_REQUEST, f"the header {tenancy.header} is missing; the gateway sets it")
        try:
            trust = tenancy.trust_client_salt
            body = await self._parts.bodies.parse(raw, tenant=tenant, trust_client_salt=trust)
            return body if self._charged else replace(body, forwarded=raw)
        except BodyError as error:
            raise RefusedRequestError(400, BAD_REQUEST, str(error)) from error

    async def _refuse(self, send: Send, error: RefusedRequestError) -> None:
        self._count(error.reason, error.status)
        headers = [(_ROUTE_HEADER, format_refusal(error.reason).encode())]
        if error.status == 503:
            headers.append((b"retry-after", str(self._parts.config.timeouts.retry_after_seconds).encode()))
        await send_json(send, error.status, _error_body(error), headers)

    def _count(self, reason: str, code: int) -> None:
        self._parts.metrics.requests.labels(reason, str(code)).inc()

    def _count_expected(self, route: Route) -> None:
        metrics = self._parts.metrics
        metrics.prompt_blocks.inc(len(route.chain))
        for tier, blocks in (("gpu", route.blocks.gpu), ("ram", route.blocks.ram), ("valkey", route.blocks.valkey)):
            metrics.expected_blocks.labels(tier).inc(blocks)
        log.debug(
            "routed",
            extra=fields(endpoint=route.target.name, reason=route.reason, prompt_tokens=route.prompt_tokens),
        )


async def _discard(opening: asyncio.Task[UpstreamAnswer]) -> None:
    """Nobody wants the answer: close the connection, so that the engine gives the request up."""
    opening.cancel()
    [answer] = await asyncio.gather(opening, return_exceptions=True)
    if isinstance(answer, UpstreamAnswer):
        answer.response.close()


def _refusal(exchange: _Exchange) -> RefusedRequestError:
    model = exchange.plan.body.model or "any model"
    if exchange.cause == BROKEN:
        return RefusedRequestError(502, UPSTREAM_FAILED, "the engine broke the connection and no other is ready")
    return RefusedRequestError(503, NO_ENDPOINT, f"no endpoint for {model} is ready; try again shortly")


def _error_body(error: RefusedRequestError) -> object:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.reason}}


def _header(scope: Scope, name: bytes) -> str | None:
    """The value of a request header; None when absent, RefusedRequestError when it was sent twice."""
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise RefusedRequestError(400, BAD_REQUEST, f"the header {name.decode()} was sent more than once")
    return values[0].decode("latin-1").strip() if values else None


def _upstream_url(base: str, scope: Scope) -> URL:
    query = scope.get("query_string", b"").decode("latin-1")
    return URL(f"{base}{scope['path']}{'?' + query if query else ''}", encoded=True)


def build_app(parts: ProxyParts) -> Starlette:
    """The proxy's application."""

    async def health(_: Request) -> Response:
        return Response(status_code=200 if parts.table.any_usable() else 503)

    async def models(request: Request) -> Response:
        return await _merged_models(parts, request.headers.get("authorization"))

    return Starlette(
        routes=[
            Path("/v1/completions", CompletionRoute(parts), methods=["POST"]),
            Path("/v1/chat/completions", CompletionRoute(parts), methods=["POST"]),
            Path("/v1/embeddings", CompletionRoute(parts, by_load=True), methods=["POST"]),
            Path("/tokenize", CompletionRoute(parts, by_load=True, charged=False), methods=["POST"]),
            Path("/detokenize", CompletionRoute(parts, by_load=True, charged=False), methods=["POST"]),
            Path("/v1/models", models, methods=["GET"]),
            Path("/health", health, methods=["GET"]),
        ]
    )


async def _merged_models(parts: ProxyParts, authorization: str | None) -> Response:
    """What all ready endpoints tell this client that they serve, each model once."""
    ready = parts.table.usable(parts.table.all())
    answers = await asyncio.gather(*(parts.health.ask_models(endpoint, authorization) for endpoint in ready))
    told = [models for _, models in answers if models is not None]
    if told:
        cards = {name: card.raw for models in told for name, card in models.items()}
        content = msgspec.json.encode({"object": "list", "data": list(cards.values())})
        return Response(content, media_type="application/json", headers={ROUTE_HEADER: f"reason={LOAD}"})
    refused = max((status for status, _ in answers), default=0)
    if refused:
        return Response(status_code=refused, headers={ROUTE_HEADER: f"reason={LOAD}"})
    headers = {"retry-after": str(parts.config.timeouts.retry_after_seconds), ROUTE_HEADER: f"reason={NO_ENDPOINT}"}
    return Response(status_code=503, headers=headers)
