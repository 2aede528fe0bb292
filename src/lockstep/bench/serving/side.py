"""The servers that are compared: how each is started in its best setting, and a running one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    import httpx

_START = 1200.0
"""Seconds a server may take to start; vLLM compiles for minutes, for ten on a busy machine."""
_POLL = 0.05
"""Seconds between two looks whether a server that starts answers."""


@dataclass(frozen=True)
class Side:
    """A server as a value. command: with {port}, {directory}, {gguf}, {clients}, {context}, {threads}, {peers} filled
    in; program: the file that must be there; environment: beside ours; body: what its requests need."""

    name: str
    command: tuple[str, ...]
    program: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)


SIDES = {
    "lockstep": Side(
        "lockstep",
        (sys.executable, "-m", "lockstep", "serve", "{directory}", "--port", "{port}", "--model-name", "model",
         "--log-level", "warning", "--set", "serve.max_running={clients}"),
        body={"ignore_eos": True},
    ),
    "vllm": Side(
        "vllm",
        ("{peers}/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "{directory}",
         "--port", "{port}", "--host", "127.0.0.1", "--served-model-name", "model", "--dtype", "{vllm_dtype}",
         "--max-model-len", "{context}", "--max-num-seqs", "{clients}"),
        "{peers}/vllm/bin/python",
        {"VLLM_CPU_OMP_THREADS_BIND": "0-{last}", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"},
        {"ignore_eos": True},
    ),
    "llama.cpp": Side(
        "llama.cpp",
        ("{peers}/llama.cpp/llama-server", "-m", "{gguf}", "--port", "{port}", "--host", "127.0.0.1",
         "--parallel", "{clients}", "--ctx-size", "{all_context}", "--threads", "{threads}", "--no-webui",
         "--alias", "model"),
        "{peers}/llama.cpp/llama-server",
        body={"ignore_eos": True},
    ),
    "transformers": Side(
        "transformers",
        ("{peers}/transformers/bin/python", "{peers}/transformers/server.py", "{directory}", "{port}"),
        "{peers}/transformers/bin/python",
        {"HF_HUB_OFFLINE": "1"},
    ),
}  # fmt: skip
"""By name, each in its best setting. vLLM gets all cores (its default leaves one out) and float32 where the processor
has no bf16 instructions (its bfloat16 runs on a slow path there); llama.cpp its own server with a slot per client."""


class Server:
    """A side that runs, from `start` on; its process group is stopped while another side is measured."""

    def __init__(self, side: Side, values: dict[str, str]) -> None:
        self.side = side
        program = side.program.format(**values)
        if program and not Path(program).exists():
            raise LockstepError(f"{side.name} is not installed: {program} is missing. Run benchmarks/peers.sh first.")
        self._held = _free_port()
        port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        filled = {**values, "port": str(port)}
        self._command = [part.format(**filled) for part in side.command]
        # A start from warm caches finds its byte code there, as an installed program's is.
        self._environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self._environment |= {key: value.format(**filled) for key, value in side.environment.items()}
        self._log = tempfile.NamedTemporaryFile(prefix=f"lockstep-bench-{side.name}-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self.start_seconds = 0.0
        """Of the last start."""

    @property
    def body(self) -> dict[str, Any]:
        return {"model": "model", **self.side.body}

    def start(self) -> None:
        """Start it and wait until it answers a completion of one token."""
        import httpx

        with httpx.Client(base_url=self.url, timeout=_START) as client:
            began = time.perf_counter()
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            while not self._answers(client):
                if self._process.poll() is not None or time.perf_counter() - began > _START:
                    tail = Path(self._log.name).read_text(errors="replace")[-1500:]
                    self.end()
                    raise LockstepError(f"{self.side.name} did not start ({' '.join(self._command)}):\n{tail}")
                time.sleep(_POLL)
            self.start_seconds = time.perf_counter() - began

    def start_again(self) -> None:
        """End it and start it, from the caches that it has filled."""
        self._kill()
        self.start()

    def pause(self) -> None:
        """Let nothing of it run: a server that spins while idle would take the other's time."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self._kill()
        self._log.close()
        self._held.close()

    def peak_memory(self) -> int:
        """Bytes: the largest resident memory of its processes so far, added up."""
        assert self._process is not None
        return sum(_peak(pid) for pid in _group(self._process.pid))

    def _answers(self, client: httpx.Client) -> bool:
        import httpx

        body = {**self.body, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0}
        try:
            return client.post("/v1/completions", json=body).status_code == 200
        except httpx.HTTPError:
            return False

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _free_port() -> socket.socket:
    """A socket that keeps its port for a server: bound, and not listening, so that only one that shares addresses, as
    servers do, can bind it too, and the system gives it to nobody who asks for any port."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _group(leader: int) -> list[int]:
    """The processes of a session, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                session = entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[3]
            except OSError:
                continue
            if int(session) == leader:
                found.append(int(entry.name))
    return found


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024
