"""The collector is off while PyTorch is imported, on afterwards, and left alone where PyTorch is there already."""

import gc
import subprocess
import sys

from lockstep.cli.imports import heavy_imports

SCRIPT = """
import gc
from lockstep.cli.imports import heavy_imports
try:
    with heavy_imports():
        assert not gc.isenabled()
        import json.decoder
        {body}
except ZeroDivisionError:
    print("raised")
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def said(body: str) -> str:
    run = [sys.executable, "-c", SCRIPT.format(body=body)]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def test_off_within_and_on_after():
    assert said("pass") == "True True\n"


def test_on_again_after_an_error():
    assert said("1 / 0") == "raised\nTrue False\n"


def test_nothing_happens_where_torch_is_imported():
    import torch  # noqa: F401

    frozen = gc.get_freeze_count()
    with heavy_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
