"""Ranks as processes: what a signal does to those that answer none."""

import os
import signal
import threading
import time

import pytest

from lockstep.parallel import launch as starting
from lockstep.parallel.mesh import MeshShape

STUCK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(60)
"""


def test_ranks_that_hang_end_at_the_second_signal(tmp_path, monkeypatch, capfd):
    (tmp_path / "stuck.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(starting, "_GRACE", 0.2)

    def interrupt_twice():
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.02)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    threading.Thread(target=interrupt_twice, daemon=True).start()
    assert starting.launch([str(tmp_path)], MeshShape(dp=2), "stuck") == 130
    assert "ranks 0, 1 of 2 hung and had to be killed; go on with --resume" in capfd.readouterr().err


@pytest.mark.parametrize("times", [1, 2])
def test_an_interruption_before_ranks_can_save_is_no_failure(times, tmp_path, monkeypatch, capfd):
    """As while they import: one ends by the signal's default, the other by Python's KeyboardInterrupt."""
    (tmp_path / "begins.py").write_text(
        STUCK.replace("signal.SIG_IGN", "signal.SIG_DFL if os.environ['RANK'] == '0' else lambda *_: sys.exit(130)")
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(starting, "_GRACE", 0.2)

    def interrupt():
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.02)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert starting.launch([str(tmp_path)], MeshShape(dp=2), "begins") == 130
    told = capfd.readouterr().err.splitlines()
    assert told[0].startswith("SIGINT: the ranks end")
    assert told[1:] == ["stopped before the ranks had begun: nothing new was saved"]
