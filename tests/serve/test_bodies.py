"""Long bodies are checked on a thread of their own, short ones at once; what the endpoint gets is the same."""

from __future__ import annotations

import threading
from typing import Annotated

import pytest
from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel
from starlette.testclient import TestClient

from lockstep.serve.api.bodies import BodyRoute

checked_on: list[int] = []


def _noted(text: str) -> str:
    checked_on.append(threading.get_ident())
    return text


class Said(BaseModel):
    text: Annotated[str, AfterValidator(_noted)]
    n: int = 0


app = FastAPI()
app.router.route_class = BodyRoute


@app.post("/length")
async def length(body: Said) -> dict[str, int]:
    return {"length": len(body.text), "n": body.n, "loop": threading.get_ident()}


@pytest.mark.parametrize(("size", "beside"), [(10, False), (100_000, True)])
def test_a_long_body_is_checked_beside_the_event_loop(size: int, beside: bool) -> None:
    checked_on.clear()
    answer = TestClient(app).post("/length", json={"text": "a" * size, "n": 3}).json()
    assert (answer["length"], answer["n"]) == (size, 3)
    assert [thread != answer["loop"] for thread in checked_on] == [beside]


@pytest.mark.parametrize("raw", [b'{"text": "%s", "n": "x"}', b'{"text": "%s"', b'{"n": 1, "more": "%s"}', b'["%s"]'])
def test_a_wrong_body_gives_the_same_errors_however_long(raw: bytes) -> None:
    found = []
    for size in (10, 100_000):
        content, kind = raw % (b"a" * size), {"content-type": "application/json"}
        answer = TestClient(app).post("/length", content=content, headers=kind)
        told = [(one["type"], one["loc"][:1], one["msg"]) for one in answer.json()["detail"]]
        found.append((answer.status_code, told))
    assert found[0] == found[1]
    assert found[0][0] == 422
