#!/usr/bin/env bash
# Installs other people's clients of an OpenAI server into an environment of their own (about 300 MB; PyTorch and
# transformers, which lm-eval wants, are this project's):
#   benchmarks/clients.sh      (CLIENTS=DIR for another place)
# Then: pytest -m slow tests/serve/test_other_clients.py
set -euo pipefail
clients="${CLIENTS:-$HOME/.cache/lockstep/clients}"
python="${PYTHON:-python3}"
"$python" -c 'import torch, transformers' || {
  echo "$python has no PyTorch or transformers: activate this project's environment first, or name it with PYTHON=" >&2
  exit 1
}
"$python" -m venv "$clients"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  > "$("$clients/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
"$clients/bin/pip" install -q openai litellm langchain-openai 'lm-eval[api]'
