"""Many clients that behave badly, on a server with very few pages: nothing leaks, nothing hangs, health stays up."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import server
from tests.serve.running import engine_of, wait_for

PAGE_BYTES = 2 * 2 * 2 * 16 * 64 * 2
JSON = {"content-type": "application/json"}
BUSY = (200, 408, 429)
"""What a right request may get here: the queue is short, and some ask for a deadline."""


def large(number: int) -> dict:
    """A schema that is compiled on trial first."""
    return {"json": {"type": "object", "properties": {f"p{number}.{i}": {"type": "string"} for i in range(100)}}}


def body(draw: random.Random) -> dict:
    prompt = [[5] * draw.randint(1, 200), "the quick " * draw.randint(1, 20), ["a", "b", "c"]][draw.randint(0, 2)]
    return {
        "model": "tiny", "prompt": prompt, "max_tokens": draw.randint(1, 60), "n": draw.choice([1, 1, 3]),
        "temperature": draw.choice([0, 1]), "stream": draw.random() < 0.5, "logprobs": draw.choice([None, 2]),
        "echo": draw.random() < 0.3, "priority": draw.randint(-1, 1), "stop": draw.choice([None, "e", ["the", "🙂"]]),
        "timeout": draw.choice([None, None, 0.05]), "user": draw.choice([None, "a", "b"]),
        "structured_outputs": draw.choice([None, None, None, {"regex": "[a-z]{1,40}"}, large(draw.randint(1, 9))]),
    }  # fmt: skip


async def malformed(client: httpx.AsyncClient, url: str, draw: random.Random) -> None:
    path = draw.choice(["v1/completions", "v1/chat/completions", "v1/responses", "v1/embeddings", "tokenize"])
    raw = bytes(draw.randrange(256) for _ in range(draw.randint(0, 300)))
    broken = [raw, b'{"model": "tiny", "prompt": ', b"[" * draw.randint(1, 5000), b'{"model": "tiny", "prompt": NaN}']
    answer = await client.post(f"{url}/{path}", content=draw.choice(broken), headers=JSON)
    assert answer.status_code == 400
    wrong = {"model": "tiny", "messages": draw.choice([[], 1, [{"role": "user"}]]), "input": []}
    assert (await client.post(f"{url}/{path}", json=wrong)).status_code == 400


async def leave_early(client: httpx.AsyncClient, url: str, draw: random.Random) -> None:
    """Before the answer: while it waits, while it is computed, while its structure is compiled."""
    with contextlib.suppress(httpx.TimeoutException):
        await client.post(f"{url}/v1/completions", json=body(draw), timeout=draw.random() * 0.2)


async def leave_a_stream(client: httpx.AsyncClient, url: str, draw: random.Random) -> None:
    messages = [{"role": "user", "content": "the quick " * draw.randint(1, 20)}]
    path, asked = draw.choice(
        [
            ("completions", body(draw)),
            ("chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 60}),
            ("responses", {"model": "tiny", "input": messages, "max_output_tokens": 60}),
        ]
    )
    async with client.stream("POST", f"{url}/v1/{path}", json={**asked, "stream": True}) as answer:
        async for _ in answer.aiter_lines():
            if draw.random() < 0.2:
                break


async def flood(client: httpx.AsyncClient, url: str, draw: random.Random) -> None:
    """More at once than the queue holds: some are refused, none is lost."""
    asked = {"model": "tiny", "prompt": [7] * 30, "max_tokens": 8, "user": "flood"}
    answers = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=asked) for _ in range(30)))
    assert {answer.status_code for answer in answers} <= {200, 429}


async def ask(client: httpx.AsyncClient, url: str, draw: random.Random) -> int:
    if draw.random() < 0.1:
        texts, ids = ["the quick", "fox"], [[7], [5] * draw.randint(1, 100)]
        asked = {"model": "tiny", "input": draw.choice([texts, ids])}
        answer = await client.post(f"{url}/v1/embeddings", json=asked)
    else:
        answer = await client.post(f"{url}/v1/completions", json=body(draw))
    assert answer.status_code in BUSY, answer.text
    return answer.status_code


async def soak(url: str, seconds: float) -> dict[int, int]:
    seen: dict[int, int] = {}
    end = asyncio.get_running_loop().time() + seconds

    async def one(number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(timeout=60) as client:
            while asyncio.get_running_loop().time() < end:
                (action,) = draw.choices([malformed, leave_early, leave_a_stream, flood, ask], [20, 25, 20, 3, 32])
                status = await action(client, url, draw)
                if status is not None:
                    seen[status] = seen.get(status, 0) + 1

    async def watch() -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            while asyncio.get_running_loop().time() < end:
                assert (await client.get(f"{url}/health")).status_code == 200
                assert (await client.get(f"{url}/ready")).status_code == 200
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
        both = (process.pid, engine_of(process))
        before, memory = [descriptors(pid) for pid in both], [resident(pid) for pid in both]
        seen = asyncio.run(soak(url, seconds))
        assert seen.get(200, 0) > 0

        def value(name: str) -> float:
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

        names = ("lockstep:kv_pages_used", "vllm:num_requests_running", "vllm:num_requests_waiting")
        wait_for(lambda: not any(value(name) for name in names))
        assert value("vllm:num_preemptions_total") > 0
        assert value("lockstep:engine_starts_total") == 1
        assert (process.pid, engine_of(process)) == both
        for pid, files, kib in zip(both, before, memory, strict=True):
            assert abs(descriptors(pid) - files) <= 4
            # KiB; what Python's allocator keeps back is far less than this.
            assert resident(pid) - kib < 100_000
        assert process.poll() is None


def test_a_short_soak():
    run(6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_soak():
    """10 minutes: `pytest -m slow tests/serve/test_soak.py`."""
    run(600)
