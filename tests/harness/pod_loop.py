"""The loop that runs in a client pod: requests in as JSON lines, replies out as JSON lines, each in a thread of its own.

`tests.harness.pod_transport` sends this file's and `web`'s source to the pod's Python; invariant: standard library only.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
import threading
from typing import Any

from tests.harness import web

_writing = threading.Lock()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Do one request; an OSError or a broken reply is told by its type's name."""
    try:
        if asked["stream"]:
            streamed = web.stream(asked["url"], asked["body"], headers=asked["headers"], seconds=asked["seconds"])
            return dataclasses.asdict(streamed)
        reply = web.request(
            asked["method"], asked["url"], asked["body"], headers=asked["headers"], seconds=asked["seconds"]
        )
        body = base64.b64encode(reply.body).decode()
        return {"status": reply.status, "headers": reply.headers, "body": body}
    except Exception as error:  # noqa: BLE001  # whatever it is, the other side raises it
        return {"error": type(error).__name__, "message": str(error)}


def tell(number: int, told: dict[str, Any]) -> None:
    """One line out."""
    with _writing:
        print(json.dumps({"id": number, **told}), flush=True)


def run() -> None:
    """Until standard input ends."""
    tell(0, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        threading.Thread(target=lambda asked=asked: tell(asked["id"], answer(asked)), daemon=True).start()
