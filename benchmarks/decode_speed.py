"""Tokens per second of the engine on SmolLM2-135M in bfloat16, for some numbers of clients at once.

    python benchmarks/decode_speed.py [--clients 1,8] [--tokens 40] [--rounds 3]

Every client asks the same short chat prompt, greedily; its time counts (it is prefilled once and then comes from the
radix cache). Medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import lockstep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = lockstep.load("smollm2-135m")
    engine = lockstep.Engine(model)
    prompt = model.tokenizer.chat([{"role": "user", "content": "Write about the sea."}])
    params = lockstep.SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
    engine.generate([prompt], params)
    for clients in map(int, arguments.clients.split(",")):
        rates = []
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            engine.generate([prompt] * clients, params)
            rates.append(clients * arguments.tokens / (time.perf_counter() - start))
        print(f"{clients:3d} clients  {statistics.median(rates):6.1f} tokens/s  ({min(rates):.1f} to {max(rates):.1f})")


if __name__ == "__main__":
    main()
