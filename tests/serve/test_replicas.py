"""Several engines: the router as a value, and a real server with two engine processes."""

from __future__ import annotations

import os
import signal

import httpx
from hypothesis import given
from hypothesis import strategies as st

from lockstep.serve.router import BLOCK, Router
from tests.serve.conftest import server
from tests.serve.running import alive, children_of, gauge, meanwhile, wait_for

PREFIX = [5] * (3 * BLOCK)
OTHER = [6] * (3 * BLOCK)


def test_a_prefix_goes_where_it_was_and_what_is_new_to_the_idlest():
    router = Router()
    assert router.choose(PREFIX, None, {0: 3, 1: 1, 2: 2}) == 1
    assert router.choose([*PREFIX, 7, 8], None, {0: 0, 1: 5, 2: 2}) == 1
    assert router.choose(OTHER, None, {0: 0, 1: 5, 2: 2}) == 0
    assert router.choose(PREFIX, "salt", {0: 4, 1: 5, 2: 2}) == 2, "another salt shares nothing"
    assert router.choose([1, 2], None, {0: 1, 1: 1}) == 0


def test_the_longest_prefix_wins():
    router = Router()
    router.choose(PREFIX[:BLOCK], None, {0: 0, 1: 1})
    router.choose(PREFIX, None, {1: 0})
    assert router.choose([*PREFIX, 9], None, {0: 0, 1: 3}) == 1


def test_a_far_busier_replica_loses_its_claim():
    router = Router()
    router.choose(PREFIX, None, {0: 0, 1: 1})
    assert router.choose(PREFIX, None, {0: 8, 1: 0}) == 0
    assert router.choose(PREFIX, None, {0: 30, 1: 21}) == 0, "9 more, but less than half as many again"
    assert router.choose(PREFIX, None, {0: 9, 1: 0}) == 1
    assert router.choose(PREFIX, None, {0: 5, 1: 4}) == 1, "both know it now"


def test_what_is_forgotten_is_new():
    router = Router(memory=3)
    router.choose(PREFIX, None, {0: 0, 1: 1})
    router.forget(0)
    assert router.choose(PREFIX, None, {0: 2, 1: 1}) == 1
    for token in range(10, 14):
        router.choose([token] * BLOCK, None, {1: 0})
    assert router.choose(PREFIX, None, {0: 0, 1: 1}) == 0, "three later prefixes have pushed it out"


@given(st.lists(st.tuples(st.integers(0, 3), st.dictionaries(st.integers(0, 4), st.integers(0, 40), min_size=1))))
def test_a_ready_replica_is_chosen_whatever_came_before(requests):
    router = Router(memory=5)
    for token, loads in requests:
        assert router.choose([token] * (2 * BLOCK), None, loads) in loads


def complete(url: str, **changes: object) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True, **changes}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_two_engines_share_the_work_by_prefix_one_survives_the_other_and_none_the_server(model, tmp_path):
    model.save(tmp_path / "same")
    with server(replicas=2, weight_updates="true") as (url, process):
        assert gauge(url, "lockstep:replicas_ready") == 2
        first, other = complete(url, prompt=PREFIX), complete(url, prompt=OTHER)
        assert [cached(complete(url, prompt=[*prompt, 9])) for prompt in (PREFIX, OTHER)] == [192, 192]
        assert complete(url, prompt=PREFIX).json()["choices"] == first.json()["choices"]

        with meanwhile(url, 4) as answers:
            os.kill(children_of(process.pid)[0], signal.SIGKILL)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503], "two ran on each"
        assert httpx.get(f"{url}/ready").status_code == 200
        assert complete(url, prompt=OTHER).json()["choices"] == other.json()["choices"]

        wait_for(lambda: gauge(url, "lockstep:replicas_ready") == 2, 60)
        assert gauge(url, "lockstep:engine_starts_total") == 3
        told = httpx.post(f"{url}/v1/weights", json={"path": str(tmp_path / "same")}, timeout=60)
        assert told.status_code == 200
        assert cached(complete(url, prompt=PREFIX)) == 0, "new weights, no old prefix on any engine"
        assert complete(url, prompt=PREFIX).json()["choices"] == first.json()["choices"]

        engines = children_of(process.pid)
        assert len(engines) == 2
        process.kill()
        wait_for(lambda: not any(alive(engine) for engine in engines))
