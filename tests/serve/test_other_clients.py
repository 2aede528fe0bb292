"""Other people's clients against a real server: litellm, LangChain, lm-eval and vLLM's load generator.

They have environments of their own: `benchmarks/clients.sh` makes the first, `benchmarks/peers.sh vllm` the second.
What is not installed is skipped. Run: pytest -m slow tests/serve/test_other_clients.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import saved

HOME = Path("~/.cache/lockstep").expanduser()
CLIENTS = HOME / "clients" / "bin" / "python"
VLLM = HOME / "peers" / "vllm" / "bin" / "python"
QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " dog", " lazy"], "answer": 0},
    {"question": "def f(x):", "choices": ["\n    return x", " over"], "answer": 1},
    {"question": "Grüße aus", "choices": [" Köln", " π"], "answer": 0},
]
LOAD = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

pytestmark = pytest.mark.slow


def run(python: Path, maker: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a program of another environment printed; the test fails with it where the program did."""
    if not python.exists():
        pytest.skip(f"{python} is missing: run {maker}")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(python), *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False, cwd=cwd
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def test_litellm_and_langchain(url):
    said = run(CLIENTS, "benchmarks/clients.sh", str(Path(__file__).parent / "other_clients.py"), url)
    assert "the same answer" in said


@pytest.fixture
def tasks(tmp_path) -> Path:
    """A folder with a task of each kind that lm-eval asks a server for."""
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}}}
    shared = {**data, "test_split": "test", "doc_to_text": "{{question}}"}
    choice = {
        "task": "choosing", **shared, "output_type": "multiple_choice", "doc_to_choice": "choices",
        "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    writing = {
        "task": "writing", **shared, "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    for task in (choice, writing):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return tmp_path


def test_lm_eval_reads_the_models_own_log_probabilities(url, model, tasks):
    about = f"model=tiny,base_url={url}/v1/completions,tokenizer={saved()},num_concurrent=2,max_retries=1"
    run(
        CLIENTS, "benchmarks/clients.sh", "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", about, "--tasks", "choosing,writing", "--include_path", str(tasks), "--log_samples",
        "--output_path", str(tasks / "out"), cwd=tasks,
    )  # fmt: skip
    samples = {
        name: [json.loads(line) for line in next((tasks / "out").rglob(f"samples_{name}_*.jsonl")).open()]
        for name in ("choosing", "writing")
    }
    encode = model.tokenizer.encode
    for sample in samples["choosing"]:
        question = sample["doc"]["question"]
        for choice, told in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            prompt, whole = encode(question), encode(question + choice)
            own = model.logprobs(whole)[len(prompt) - 1 :].tolist()
            assert float(told[0][0]) == sum(own), (question, choice)
    assert [len(sample["resps"][0]) for sample in samples["writing"]] == [1] * len(QUESTIONS)


def test_vllms_load_generator(url, tmp_path):
    run(
        VLLM, "benchmarks/peers.sh vllm", "-c", LOAD, "--backend", "openai", "--base-url", url, "--endpoint",
        "/v1/completions", "--model", "tiny", "--tokenizer", saved(), "--dataset-name", "random",
        "--random-input-len", "40", "--random-output-len", "12", "--num-prompts", "24", "--max-concurrency", "8",
        "--ignore-eos", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "load.json", cwd=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "load.json").read_text())
    assert found["completed"] == 24
    assert found["total_output_tokens"] == 24 * 12
