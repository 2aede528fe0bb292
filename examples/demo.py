"""The main job, end to end: train, export, serve, ask, and compare the server's bits with the trainer's.

Run it with `make demo`, or `python examples/demo.py [--steps N]`. Everything is real: `lockstep train` and
`lockstep serve` run as processes of their own, and the requests go through the `openai` client.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from openai import OpenAI

import lockstep
from lockstep.config import load_config

HERE = Path(__file__).parent
OUT = Path("runs/demo")
PROMPTS = [
    "import os\nimport sys\n\n\ndef main(",
    '    """Return the',
    "    def __init__(self",
    "        if not isinstance(",
    "for key, value in",
    "    return",
]


@dataclass(frozen=True)
class Answer:
    """What the server said: the prompt's and the completion's token ids, and its log-probabilities."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of those in examples/demo.yaml")
    steps = parser.parse_args().steps
    title("1. Train a tokenizer and a model on the Python standard library's source")
    train(steps)
    title("2. Serve the exported Hugging Face directory and ask it, through the openai client")
    with server(OUT / "export") as url:
        answers = ask(url)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"--- {prompt!r}\n{answer.text}")
    title("3. The training forward on the same tokens, from the trainer's float32 master weights")
    return report(answers, trainer_logprobs(answers))


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def train(steps: int | None) -> None:
    """`lockstep train` on examples/demo.yaml, into a fresh directory."""
    shutil.rmtree(OUT, ignore_errors=True)
    command = [sys.executable, "-m", "lockstep", "train", str(HERE / "demo.yaml"), "--out", str(OUT)]
    subprocess.run(command + (["--steps", str(steps)] if steps else []), check=True)


@contextmanager
def server(model: Path) -> Iterator[str]:
    """`lockstep serve` on a free port of this machine; yields its URL once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "lockstep", "serve", str(model), "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while not ready(url):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode} before it was ready")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str) -> list[Answer]:
    """One prompt greedily, the others sampled; the prompts of a request are decoded as a batch."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answers = []
    for temperature, prompts in ((0.0, PROMPTS[:1]), (0.7, PROMPTS[1:])):
        response = client.completions.create(
            model=model, prompt=prompts, max_tokens=48, temperature=temperature, seed=1, logprobs=1,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        answers += [read(choice) for choice in sorted(response.choices, key=lambda c: c.index)]
    return answers


def read(choice: object) -> Answer:
    values = np.array(choice.logprobs.token_logprobs, dtype=np.float32)  # type: ignore[attr-defined]
    return Answer(choice.prompt_token_ids, choice.token_ids, values, choice.text)  # type: ignore[attr-defined]


def trainer_logprobs(answers: list[Answer]) -> list[np.ndarray]:
    """Log-probabilities of the same tokens by the training forward, teacher-forced, each sequence whole."""
    trainer = lockstep.Trainer(load_config(OUT / "config.yaml"), resume=OUT)
    try:
        values = []
        for answer in answers:
            whole = trainer.model.logprobs(answer.prompt_ids + answer.token_ids)
            values.append(whole[len(answer.prompt_ids) - 1 :].numpy())
        return values
    finally:
        trainer.close()


def report(answers: list[Answer], expected: list[np.ndarray]) -> int:
    served = np.concatenate([answer.logprobs for answer in answers])
    trained = np.concatenate(expected)
    assert served.shape == trained.shape, "the server and the trainer disagree on the number of tokens"
    differ = int((served.view(np.uint32) != trained.view(np.uint32)).sum())
    print(f"first five, server:  {served[:5].tolist()}\nfirst five, trainer: {trained[:5].tolist()}")
    print("log-probabilities, server against training forward, as raw bytes:")
    print(f"{differ} of {len(served)} values differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
