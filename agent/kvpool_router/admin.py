"""The router's admin API.

Invariant: health and metrics are open and name no prompt; everything else needs the bearer token, which is read anew
for each call so that it may be rotated.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvpool_core.errors import ConfigError
from kvpool_router.asgi import BodyTooLargeError, BodyTooSlowError, read_body
from kvpool_router.body_room import NoRoomError
from kvpool_router.config import read_token
from kvpool_router.endpoints import EndpointState
from kvpool_router.fleet_index import GPU, RAM, VALKEY, AgentState
from kvpool_router.picker import Picker, Plan, Route
from kvpool_router.reasons import NO_ENDPOINT
from kvpool_router.request_body import BodyError
from kvpool_router.router import Router

_bearer = HTTPBearer(auto_error=False)


def require_token(token_file: str) -> Callable[[HTTPAuthorizationCredentials | None], None]:
    """A dependency that answers 401 unless the request carries the token in `token_file`."""

    def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
        try:
            token = read_token(token_file, "admin.token_file")
        except ConfigError as error:
            raise HTTPException(503, "the router's own token cannot be read") from error
        given = credentials.credentials if credentials is not None else ""
        if not secrets.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "a bearer token is needed", headers={"WWW-Authenticate": "Bearer"})

    return check


def build_admin(router: Router) -> FastAPI:
    """The admin application."""
    app = FastAPI(title="kvpool router", openapi_url=None)
    app.include_router(_open_routes(router))
    app.include_router(_guarded_routes(router), dependencies=[Depends(require_token(router.config.admin.token_file))])
    return app


def _open_routes(router: Router) -> APIRouter:
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz")
    async def readyz(response: Response) -> dict[str, str]:
        problem = router.not_ready()
        response.status_code = 503 if problem else 200
        return {"status": problem or "ready"}

    @routes.get("/metrics")
    async def metrics() -> Response:
        router.refresh_gauges()
        return Response(generate_latest(router.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return routes


def _guarded_routes(router: Router) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/endpoints")
    async def endpoints() -> list[dict[str, object]]:
        return [_endpoint(router, endpoint) for endpoint in router.table.all()]

    @routes.get("/index")
    async def index() -> dict[str, object]:
        return _index(router)

    @routes.post("/explain")
    async def explain(request: Request) -> dict[str, object]:
        tenant = request.headers.get(router.config.tenancy.header, "")
        trust = router.config.tenancy.trust_client_salt
        with router.bodies.share() as share:
            try:
                config = router.config
                seconds = config.timeouts.body_seconds
                raw = await read_body(request.receive, max_bytes=config.max_body_bytes, seconds=seconds, share=share)
                body = await router.bodies.parse(raw, tenant=tenant, trust_client_salt=trust)
            except BodyError as error:
                raise HTTPException(400, str(error)) from error
            except BodyTooLargeError as error:
                raise HTTPException(413, str(error)) from error
            except BodyTooSlowError as error:
                raise HTTPException(408, str(error)) from error
            except NoRoomError as error:
                raise HTTPException(503, str(error)) from error
            plan = await router.picker.plan(body, authorization=None)
            return _explanation(router.picker, plan)

    return routes


def _endpoint(router: Router, endpoint: EndpointState) -> dict[str, object]:
    refs = router.fleet.engines_at(endpoint.address, endpoint.spec.agent)
    return {
        "endpoint": endpoint.address,
        "agent": endpoint.spec.agent,
        "up": endpoint.up,
        "problem": endpoint.problem,
        "models": sorted(endpoint.models or {}),
        "silent": endpoint.silent,
        "running": router.picker.running_at(endpoint),
        "engines": [
            {
                "engine_id": ref.info.engine_id,
                "dp_rank": ref.info.dp_rank,
                "agent": ref.agent,
                "domain": ref.info.domain.hex(),
                "block_size": ref.info.block_size,
                "block_tokens": ref.block_tokens,
                "gpu_blocks": router.fleet.index.count(router.fleet.holder_masks(ref, shared_tiers=False)[0]),
            }
            for ref in refs
        ],
    }


def _index(router: Router) -> dict[str, object]:
    index = router.fleet.index
    return {
        "entries": len(index),
        "evicted": index.evicted,
        "holders": index.live_holders,
        "speculative_entries": len(router.speculative),
        "agents": {name: _agent(router, state) for name, state in router.fleet.agent_states().items()},
    }


def _agent(router: Router, state: AgentState) -> dict[str, object]:
    index = router.fleet.index
    return {
        "in_step": state.lost_at is None,
        "boot_id": state.boot_id.hex(),
        "engines": len(state.view.engines),
        "blocks": {
            tier: sum(index.count(holder) for holder in state.view.holders_of(tier)) for tier in (GPU, RAM, VALKEY)
        },
    }


def _explanation(picker: Picker, plan: Plan) -> dict[str, object]:
    route = picker.choose(plan, now=time.monotonic())
    if route is None:
        return {"endpoint": None, "reason": NO_ENDPOINT, "prompt_tokens": plan.prompt_tokens, "scores": []}
    return {
        "endpoint": route.target.endpoint.address,
        "dp_rank": route.target.dp_rank,
        "reason": route.reason,
        "prompt_tokens": plan.prompt_tokens,
        "tokens_known": plan.tokens is not None,
        "prompt_blocks": len(route.chain),
        "scores": [_score(route, position) for position in range(len(route.choice.scores))],
    }


def _score(route: Route, position: int) -> dict[str, object]:
    score = route.choice.scores[position]
    return asdict(score) | {"blocks": asdict(route.blocks_by_target[score.target])}
