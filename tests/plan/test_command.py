"""`lockstep plan` and `lockstep bench plan` as a user runs them."""

import json
import subprocess
import sys

import pytest

from lockstep.cli.app import run
from lockstep.plan import load_plan


def test_plan(tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    asked = ["plan", "llama3-8b", "--cluster", "64xH100", "--seq", "8192", "--global-batch-tokens", "4M"]
    assert run([*asked, "--pin", "tp=2", "--top", "3", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "best  " in text
    assert "memory  " in text
    assert text.count("% slower:") == 2
    assert load_plan(out).layout.tp == 2
    assert load_plan(out).batch.tokens == 4 << 20
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.html", "plan.trace.json", "plan.yaml"]
    assert json.loads((tmp_path / "plan.trace.json").read_text())["traceEvents"]
    page = (tmp_path / "plan.html").read_text()
    assert load_plan(out).layout.describe() in page
    assert page.count('class="front"') >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3-8b", "--cluster", "64xH10"], "nearest name is 'H100'"),
        (["llama3-8b", "--global-batch-tokens", "lots"], "expected a number such as 4M"),
        (["llama3-8b", "--pin", "tp"], "expected KEY=VALUE"),
        (["llama3-8b", "--dtype", "fp4"], "described for bf16"),
        (["calibrate", "steps.yaml", "--pin", "tp=2"], "takes --cluster, --out and --force; leave out --pin"),
        (["calibrate", "steps.yaml", "--top", "5", "--no-report"], "leave out --top, --report"),
        (["calibrate", "steps.yaml", "--dtype", "fp32"], "leave out --dtype"),
        (["calibrate"], "needs a file of measured steps"),
        ([""], "model is empty: give a name"),
        (["llama3-8b", "--global-batch-tokens", "-4M"], "a step has at least 1 token"),
        (["llama3-8b", "steps.yaml"], "one model at a time"),
        (["llama3-8b", "--global-batch-tokens", "1e400"], "expected a number such as 4M"),
        (["llama3-8b", "--pin", "tp=2", "--pin", "tp=4"], "--pin tp is given twice, as 2 and as 4"),
        (["llama3-8b", "--top", "0"], "--top '0': it should be greater than or equal to 1"),
        (["llama3-8b", "--seq", "1.5"], "--seq '1.5': it should be a valid integer"),
        (["llama3-8b", "--out", "x" * 300], "File name too long: choose a shorter name"),
        (["llama3-8b", "--coefficients", "."], "cannot be read: Is a directory"),
        (["llama3-8b", "--pin", "sequence_parallel=maybe"], "pin sequence_parallel=maybe: expected 0 or 1"),
        (["llama3-8b", "--pin", "recompute_layers=30", "--pin", "offload_layers=3"], "are of 33 layers, and llama3-8b"),
        (["smollm2-135m", "--seq", "1", "--global-batch-tokens", "1", "--pin", "dp=8"], "and 1 sequence of 1 token."),
        # X-135m and 1 sequence of 1 token."),
        (["llama3-8b", "--out", "plan.html"], "give a name such as plan.yaml"),
        (["llama3-8b", "--out", ""], "names no file: give a name such as plan.yaml"),
        (["nowhere.yaml"], "cannot be read: No such file"),
        (["llama3-8b", "--out", "nowhere/plan.yaml"], "Choose another --out"),
    ],
)
def test_mistakes(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "plan.html").mkdir()
    asked = ["plan", "llama3-1b", "--cluster", "2xH100", "--global-batch-tokens", "64K"]
    assert run([*asked, "--out", str(tmp_path / "plan.yaml")]) == 2
    assert "plan.html: it is a directory. Choose another --out" in capsys.readouterr().err
    steps = tmp_path / "steps.yaml"
    steps.write_text("- {model: llama3-8b, layout: {dp: 8}, sequences: 64, seq: 2048, step_s: 4.0}\n")
    assert run(["plan", "calibrate", str(steps), "--cluster", "8xA100", "--out", str(tmp_path / "no" / "c.yaml")]) == 2
    assert "Choose another --out" in capsys.readouterr().err


def test_calibrate(tmp_path, capsys):
    steps, out = tmp_path / "steps.yaml", tmp_path / "c.yaml"
    steps.write_text("- {model: llama3-8b, layout: {dp: 8}, sequences: 64, seq: 2048, step_s: 4.0}\n")
    assert run(["plan", "calibrate", str(steps), "--cluster", "8xA100", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "fitted 1 measured step on 8xA100" in text
    (row,) = [line for line in text.splitlines() if line.endswith("llama3-8b dp8 mb1 recompute none")]
    described, fitted = (abs(float(part.split()[0])) for part in row.split("(")[1:])
    assert fitted < 0.3 * described
    assert "on the efficiency of matrix products" in text
    assert "layer shapes that were measured: 1" in text
    assert f"mean error {described:.1f} % as described, {fitted:.1f} % fitted" in text
    plan = ["plan", "llama3-8b", "--cluster", "8xA100", "--coefficients", str(out), "--out", str(tmp_path / "p.yaml")]
    assert run([*plan, "--no-report"]) == 0
    assert not (tmp_path / "p.html").exists()


def test_the_planner_needs_no_torch():
    code = "import sys, lockstep.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_says_its_own_batch(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "model: {vocab_size: 96, hidden_size: 64, intermediate_size: 96, num_layers: 2, num_heads: 4,\n"
        " num_kv_heads: 2}\n"
        "data: {seq_len: 128}\ntrain: {micro_batch: 2, micro_batches: 8}\n"
    )
    asked = ["plan", "run.yaml", "--cluster", "2xH100", "--no-report"]
    assert run(asked) == 0
    assert "16 sequences of 128 tokens per step" in capsys.readouterr().out
    assert run([*asked, "--seq", "64", "--global-batch-tokens", "1K"]) == 0
    assert "16 sequences of 64 tokens per step" in capsys.readouterr().out


def test_an_earlier_plan_is_replaced_and_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_file, asked = tmp_path / "run.yaml", ["plan", "run.yaml", "--cluster", "2xH100"]
    content = (
        "model: {vocab_size: 96, hidden_size: 64, intermediate_size: 96, num_layers: 2, num_heads: 4,\n"
        " num_kv_heads: 2}\ndata: {seq_len: 128}\ntrain: {micro_batch: 2, micro_batches: 8}\n"
    )
    run_file.write_text(content)
    assert run([*asked, "--out", "run.yaml"]) == 2
    assert "run.yaml is there and no earlier plan: choose another --out, or replace it with" in capsys.readouterr().err
    assert run_file.read_text() == content
    assert run(asked) == 0
    assert "in place of" not in capsys.readouterr().out
    assert run([*asked, "--no-report"]) == 0
    text = capsys.readouterr().out
    assert "in place of an earlier plan.yaml; removed plan.html, plan.trace.json" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.yaml", "run.yaml"]
    (tmp_path / "plan.html").write_text("<html>mine</html>")
    assert run(asked) == 2
    assert "plan.html is there and no earlier report" in capsys.readouterr().err
    assert run([*asked, "--no-report"]) == 0
    assert (tmp_path / "plan.html").read_text() == "<html>mine</html>"
    assert run([*asked, "--force"]) == 0
    assert "lockstep plan" in (tmp_path / "plan.html").read_text()
