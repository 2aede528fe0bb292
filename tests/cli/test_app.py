"""The command line itself: start-up, help, usage errors, exit codes, --debug."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lockstep.cli import app
from lockstep.errors import LockstepError


def lockstep(*arguments: str) -> SimpleNamespace:
    """One run in a process of its own."""
    run = subprocess.run([sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, check=False)
    return SimpleNamespace(code=run.returncode, out=run.stdout, err=run.stderr)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run in this process, with a command `doctor` that does what the test says."""

    def go(*arguments, command=None):
        if command is not None:
            monkeypatch.setattr(app, "_function", lambda name: command)
        with pytest.raises(SystemExit) as exit_:
            app.main(arguments)
        captured = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code, out=captured.out, err=captured.err)

    return go


def raising(error):
    def command():
        raise error

    return command


def test_help_lists_the_commands_that_exist(run):
    page = run("--help")
    assert page.code == 0
    assert "doctor" in page.out
    assert "Print the resolved configuration" in page.out
    listed = page.out.partition("Commands:")[2]
    assert {name for name in app.COMMANDS if f"  {name} " in listed} == {
        n for n in app.COMMANDS if app._file(n).exists()
    }
    assert run().out == page.out


def test_every_command_file_has_its_function_and_a_help_line(run):
    for name in every_command():
        words = name.split(".")
        assert callable(app._function(name))
        assert app._listed(words[-1], app._file(name)).__doc__, f"{name} has no docstring"
        assert run(*words, "--help").code == 0


def every_command():
    """The names of all commands that exist, sub-commands as "bench.plan"."""
    for name in app.COMMANDS:
        file = app._file(name)
        if file.name == "__init__.py":
            yield from (f"{name}.{path.stem}" for path in file.parent.glob("[!_]*.py"))
        elif file.exists():
            yield name


def test_a_folder_of_commands_lists_them_and_names_the_right_page(run):
    page = run("bench", "--help")
    assert page.code == 0
    assert "The planner's errors against published" in page.out
    wrong = run("bench", "nothing")
    assert wrong.code == 2
    assert "No such command 'nothing'" in wrong.err
    assert "lockstep bench --help lists" in wrong.err


def test_listing_a_folder_of_commands_imports_none_of_them():
    code = (
        "from lockstep.cli import app; app.run(['bench', '--help']); sys.exit('lockstep.cli.bench.plan' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", f"import sys; {code}"], stdout=subprocess.DEVNULL).returncode == 0


def test_help_starts_quickly_and_does_not_import_torch():
    code = "import sys; from lockstep.cli import app; app.run(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
    before = _child_seconds()
    lockstep("--help")
    assert _child_seconds() - before < 0.5


def _child_seconds() -> float:
    """Processor time of the finished children: on a busy machine the wall clock measures the others."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_version(run):
    assert run("--version").out.startswith("lockstep 0.")


def test_a_users_mistake_is_a_message_and_code_2(run):
    result = run("doctor", command=raising(LockstepError("the port 8000 is in use: choose another")))
    assert (result.code, result.out, result.err) == (2, "", "lockstep: the port 8000 is in use: choose another\n")


@pytest.mark.parametrize("arguments", [("--debug", "doctor"), ("doctor", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(run, arguments):
    result = run(*arguments, command=raising(LockstepError("wrong")))
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.endswith("lockstep: wrong\n")


def test_debug_after_a_bare_dash_dash_is_an_argument():
    assert app._take_debug(["a", "--", "--debug"]) == (False, ["a", "--", "--debug"])
    assert app._take_debug(["a", "--debug", "--", "b"]) == (True, ["a", "--", "b"])


def test_a_bug_is_one_line_with_the_way_to_its_traceback(run):
    result = run("doctor", command=raising(ZeroDivisionError("division by zero")))
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert "this is a bug: ZeroDivisionError: division by zero" in result.err
    assert "--debug" in result.err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "lockstep: No space left on device: free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "lockstep: a/b: Permission denied: check its"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory: ask for less of this machine's"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 64 bytes"), "this machine's memory is too small"),
    ],
)
def test_what_the_system_refuses_is_no_bug(run, error, told):
    result = run("doctor", command=raising(error))
    assert result.code == 2
    assert told in result.err


def test_an_interrupt_is_quiet(run):
    result = run("doctor", command=raising(KeyboardInterrupt()))
    assert (result.code, result.out, result.err.strip()) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("confg",), "'config'"),
        (("config", "--ste", "a=1"), "--set"),
        (("--verison",), "--version"),
        (("config", "a", "b"), "lockstep config --help"),
    ],
)
def test_wrong_usage_names_the_nearest(run, arguments, told):
    result = run(*arguments)
    assert result.code == 2
    assert told in result.err
    assert "Traceback" not in result.err


def test_config_prints_the_resolved_configuration(run, tmp_path):
    (tmp_path / "run.yaml").write_text("train: {steps: 7}\n")
    printed = run("config", str(tmp_path / "run.yaml"), "--set", "optimizer.lr=1e-4")
    assert printed.code == 0
    assert "steps: 7" in printed.out
    (tmp_path / "again.yaml").write_text(printed.out)
    assert run("config", str(tmp_path / "again.yaml")).out == printed.out


def test_config_prints_the_reference(run):
    assert run("config", "reference").out.startswith("# Configuration\n")


def test_a_wrong_key_on_the_command_line_has_no_traceback():
    result = lockstep("config", "--set", "train.stpes=3")
    assert (result.code, result.out) == (2, "")
    assert "did you mean `train.steps`?" in result.err
    assert "Traceback" not in result.err


def test_a_closed_pipe_is_no_bug():
    run = subprocess.run(
        f"{sys.executable} -m lockstep config reference | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "# Configuration\n"
    assert run.stderr == ""


def test_threads_wait_asleep_unless_told_otherwise():
    """OpenMP reads the policy when torch is imported, so it must be there by then; the user's own stays."""
    script = "import lockstep, os; print(os.environ['OMP_WAIT_POLICY'])"
    bare = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    for given, expected in ((bare, "passive"), ({**bare, "OMP_WAIT_POLICY": "active"}, "active")):
        run = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == expected
