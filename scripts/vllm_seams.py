"""`make seams`: the tests of what is relied on inside vLLM, on the Python of each minor version that pyproject.toml allows.

The wheels are those for CUDA. They import without a GPU: a platform plugin, vLLM's own way for that, says that there is a CPU.
Each is installed by pip into a folder of its own, without torch and what needs a GPU; everything else is this environment's. No
engine is started: a wheel's kernels are for CUDA. A version that pip cannot install is skipped, with pip's reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/mocked_server/vllm/test_vllm_seams.py",
    "tests/mocked_server/vllm/test_engine_arguments.py",
    "tests/mocked_server/vllm/test_served_requests.py",
    "tests/mocked_server/http/test_dialects.py",
    "tests/mocked_server/test_server.py",
)
PLUGIN = """\
def cpu() -> str:
    return "vllm.platforms.cpu.CpuPlatform"
"""
ENTRY_POINTS = "[vllm.platform_plugins]\ncpu = vllm_on_cpu:cpu\n"
METADATA = "Metadata-Version: 2.1\nName: vllm-on-cpu\nVersion: 1\n"
NOT_ON_CPU = re.compile(
    r"torch.*|nvidia-.*|flashinfer.*|.*-kernels|tilelang|nvtx|tokenspeed.*|pynvvideocodec|fastsafetensors|instanttensor"
)
"""What vLLM needs for a GPU only; torch is this environment's."""


def allowed_minors(requirement: str) -> list[str]:
    """`vllm>=0.32,<0.34` -> ["0.32", "0.33"]. Raises ValueError for a requirement of another form."""
    found = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", requirement)
    if found is None:
        raise ValueError(f"the requirement must look like vllm>=0.32,<0.34, got {requirement}; change pyproject.toml")
    return [f"0.{minor}" for minor in range(int(found[1]), int(found[2]))]


def missing(requirements: list[str]) -> list[str]:
    """Those without an installed distribution, but for what a GPU is needed for and what only extras ask for."""
    wanted = []
    for line in requirements:
        name = re.split(r"[^\w.-]", line)[0]
        if "extra ==" in line or NOT_ON_CPU.fullmatch(name.lower()):
            continue
        try:
            distribution(name)
        except PackageNotFoundError:
            wanted.append(line.partition(";")[0].strip())
    return wanted


def installed(minor: str, *, folder: Path) -> str:
    """Installs the newest vLLM of this minor version into `folder`; returns its version. Raises OSError with pip's reason."""
    if not (folder / ".ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _pip(f"vllm=={minor}.*", folder=folder)
        for requirement in missing(_vllm(folder).requires or []):
            _pip(requirement, folder=folder)
        (folder / "vllm_on_cpu.py").write_text(PLUGIN)
        info = folder / "vllm_on_cpu-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA)
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        (folder / ".ready").touch()
    return _vllm(folder).version


def _vllm(folder: Path) -> Distribution:
    return Distribution.at(next(folder.glob("vllm-*.dist-info")))


def _pip(requirement: str, *, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--target", str(folder), requirement], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise OSError((done.stderr.strip().splitlines() or ["pip said nothing"])[-1])


def run_tests(folder: Path, *, version: str, more: list[str]) -> int:
    """pytest's exit code; 1 where another vLLM would be tested."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    ask = "import vllm; from vllm.platforms import current_platform; print(vllm.__version__, current_platform.device_type)"
    asked = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, env=environment, capture_output=True, text=True)
    if asked.stdout.split() != [version, "cpu"]:
        print(f"vllm {version} on a CPU must be what Python imports, got {asked.stdout.strip()}: {asked.stderr[-500:]}")
        return 1
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *more]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 the tests passed on every version that could be had; 1 not so, or none could be had."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="the versions are kept there, 800 MB each")
    parser.add_argument("--only", nargs="+", default=[], metavar="MINOR", help="these versions, such as 0.33")
    parser.add_argument("more", nargs="*", help="arguments for pytest")
    arguments = parser.parse_args(argv)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirement, *_ = project["optional-dependencies"]["gpu"]
    ended: dict[str, str] = {}
    for minor in arguments.only or allowed_minors(requirement):
        folder = arguments.folder.absolute() / f"vllm-{minor}"
        print(f"vllm {minor}: installing into {folder}", flush=True)
        try:
            version = installed(minor, folder=folder)
        except OSError as error:
            ended[minor] = f"skipped: {error}"
            continue
        print(f"vllm {version}: testing", flush=True)
        ended[version] = "passed" if run_tests(folder, version=version, more=arguments.more) == 0 else "failed"
    for version, end in ended.items():
        print(f"vllm {version}: {end}")
    return 0 if "passed" in ended.values() and "failed" not in ended.values() else 1


if __name__ == "__main__":
    sys.exit(main())
