"""What a user of `transformers` would put behind HTTP: `generate` on what arrived together, streamed token by token.

    python transformers_server.py DIRECTORY PORT [DTYPE]

One static batch at a time: requests that come within 50 ms share it. Prompts of a batch have equal lengths here, so
nothing is padded. DTYPE: float32 by default, many times faster than bfloat16 on a CPU without bf16 instructions.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM

requests: queue.SimpleQueue[tuple[list[int], int, queue.SimpleQueue]] = queue.SimpleQueue()


class Tokens:
    """The streamer of a batch: hands each new token to the request it belongs to."""

    def __init__(self, answers: list[queue.SimpleQueue]) -> None:
        self.answers = answers
        self.prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self.prompt:
            self.prompt = False
            return
        for token, answer in zip(value.flatten().tolist(), self.answers, strict=True):
            answer.put(token)

    def end(self) -> None:
        for answer in self.answers:
            answer.put(None)


def generate(model: torch.nn.Module) -> None:
    while True:
        batch = [requests.get()]
        time.sleep(0.05)
        while not requests.empty():
            batch.append(requests.get())
        prompts, lengths, answers = zip(*batch, strict=True)
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(lengths), min_new_tokens=max(lengths),
                do_sample=False, streamer=Tokens(list(answers)),
            )  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: queue.SimpleQueue = queue.SimpleQueue()
        requests.put((body["prompt"], body["max_tokens"], answer))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = 0
        while (token := answer.get()) is not None:
            count += 1
            self._event({"choices": [{"text": str(token)}]})
        self._event({"choices": [], "usage": {"completion_tokens": count}})
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _event(self, event: dict) -> None:
        self._chunk("data: " + json.dumps(event) + "\n\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    directory, port = sys.argv[1], int(sys.argv[2])
    dtype = getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "float32")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    threading.Thread(target=generate, args=(model,), daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
