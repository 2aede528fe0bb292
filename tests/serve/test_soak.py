"""Many clients that behave badly, on a server with very few pages: nothing leaks, nothing hangs, health stays up."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import server

PAGE_BYTES = 2 * 2 * 2 * 16 * 64 * 2


def body(draw: random.Random) -> dict:
    prompt = [[5] * draw.randint(1, 200), "the quick " * draw.randint(1, 20), ["a", "b", "c"]][draw.randint(0, 2)]
    return {
        "model": "tiny", "prompt": prompt, "max_tokens": draw.randint(1, 60), "n": draw.choice([1, 1, 3]),
        "temperature": draw.choice([0, 1]), "stream": draw.random() < 0.5, "logprobs": draw.choice([None, 2]),
        "echo": draw.random() < 0.3, "priority": draw.randint(-1, 1), "stop": draw.choice([None, "e", ["the", "🙂"]]),
        "timeout": draw.choice([None, None, 0.05]),
    }  # fmt: skip


async def misbehave(client: httpx.AsyncClient, url: str, draw: random.Random, seen: dict[int, int]) -> None:
    kind = draw.random()
    json_type = {"content-type": "application/json"}
    if kind < 0.1:
        raw = bytes(draw.randrange(256) for _ in range(draw.randint(0, 300)))
        answer = await client.post(f"{url}/v1/completions", content=raw, headers=json_type)
        assert answer.status_code == 400
    elif kind < 0.2:
        answer = await client.post(
            f"{url}/v1/chat/completions", json={"model": "tiny", "messages": draw.choice([[], 1])}
        )
        assert answer.status_code == 400
    elif kind < 0.45:
        with contextlib.suppress(httpx.TimeoutException):  # leave before the answer
            await client.post(f"{url}/v1/completions", json=body(draw), timeout=draw.random() * 0.2)
    elif kind < 0.65:
        async with client.stream("POST", f"{url}/v1/completions", json={**body(draw), "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                if draw.random() < 0.2:
                    break  # leave in mid-stream
    else:
        answer = await client.post(f"{url}/v1/completions", json=body(draw))
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 429, 504), answer.text


async def soak(url: str, seconds: float) -> dict[int, int]:
    seen: dict[int, int] = {}
    end = asyncio.get_running_loop().time() + seconds

    async def one(number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(timeout=60) as client:
            while asyncio.get_running_loop().time() < end:
                await misbehave(client, url, draw, seen)

    async def watch() -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            while asyncio.get_running_loop().time() < end:
                assert (await client.get(f"{url}/health")).status_code == 200
                await asyncio.sleep(0.2)

    await asyncio.gather(watch(), *(one(i) for i in range(12)))
    return seen


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


def run(seconds: float) -> None:
    with server(kv_memory=f"{12 * PAGE_BYTES}B", max_queue=20, max_batch_tokens=64, drafts=2) as (url, process):
        asyncio.run(soak(url, 2))
        before, memory = descriptors(process.pid), resident(process.pid)
        seen = asyncio.run(soak(url, seconds))
        assert seen.get(200, 0) > 0

        def value(name: str) -> float:
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

        for name in ("lockstep:kv_pages_used", "vllm:num_requests_running", "vllm:num_requests_waiting"):
            assert value(name) == 0
        assert value("vllm:num_preemptions_total") > 0
        assert abs(descriptors(process.pid) - before) <= 4
        # KiB; what Python's allocator keeps back is far less than this.
        assert resident(process.pid) - memory < 100_000
        assert process.poll() is None


def test_a_short_soak():
    run(6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_soak():
    run(600)
