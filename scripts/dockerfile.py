"""Checks the Dockerfile without docker: `python scripts/dockerfile.py`.

The base image's Debian has the packages of apt and can install them together, pip finds versions for what scripts/setup.sh
installs for the CPU, every file that is copied is there and sent to docker, and the entry point answers. hadolint judges the
rest, where it is on PATH. Needs Debian's apt, or Ubuntu's, and the Python of that Debian for pip to judge as it does in the image.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its words) of a Dockerfile, one a line: comments are dropped, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def sent(text: str) -> list[str]:
    """What a .dockerignore that ignores everything else lets through."""
    return [line[1:] for line in text.splitlines() if line.startswith("!")]


def missing_files(steps: list[tuple[str, str]], let_through: list[str]) -> list[str]:
    """What is copied, or let through, and is not there; and what is copied and not sent."""
    copied = [word for step, words in steps if step == "COPY" and "--from" not in words for word in words.split()[:-1]]
    unsent = [file for file in copied if file != "." and not {file, file.split("/")[0]} & set(let_through)]
    return unsent + [file for file in (*copied, *let_through) if not (ROOT / file).exists()]


def apt_packages(steps: list[tuple[str, str]]) -> list[str]:
    found = [re.findall(r"apt-get install (.*?)(?: && |$)", words) for step, words in steps if step == "RUN"]
    return [word for lines in found for line in lines for word in line.split() if not word.startswith("-")]


def run(*words: str) -> None:
    """Says what it runs; ends the check where that fails."""
    print("+", shlex.join(words)[:160], flush=True)
    if code := subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"Dockerfile: a step must succeed, got exit code {code} of: {shlex.join(words)}")


def check_apt(steps: list[tuple[str, str]]) -> None:
    """In a Debian of its own, of which nothing is installed."""
    (release,) = {words.split(":")[1].split("-")[0] for step, words in steps if step == "FROM" and ":" in words}
    with tempfile.TemporaryDirectory() as folder:
        for place in ("lists/partial", "archives/partial", "empty"):
            (Path(folder) / place).mkdir(parents=True)
        sources, status = Path(folder) / "sources.list", Path(folder) / "status"
        sources.write_text(f"deb http://deb.debian.org/debian {release} main\n")
        status.touch()
        settings = {
            "Dir::Etc::SourceList": sources, "Dir::Etc::SourceParts": f"{folder}/empty", "Dir::State::Lists": f"{folder}/lists",
            "Dir::State::Status": status, "Dir::Cache": folder,
        }  # fmt: skip
        apt = ["apt-get", "--quiet", *(f"--option={name}={value}" for name, value in settings.items())]
        run(*apt, "update")
        run(*apt, "install", "--simulate", "--no-install-recommends", *apt_packages(steps))


def check_pip(steps: list[tuple[str, str]]) -> None:
    """The extras are those that the Dockerfile names, for the CPU."""
    (extras,) = [
        re.findall(r'setup\.sh \S+ "\$DEVICE" ([a-z ]*[a-z])', words)[0] for _, words in steps if "setup.sh /" in words
    ]
    listed = [sys.executable, "scripts/dependencies.py", *extras.split(), "cpu"]
    needed = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        run(*pip, "--constraint", "constraints.txt", *filter(None, needed))


def main() -> None:
    """Exit codes: 0 nothing is wrong, 1 something is, which was said."""
    steps = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    if missing := missing_files(steps, sent((ROOT / ".dockerignore").read_text(encoding="utf-8"))):
        sys.exit(f"Dockerfile: what is copied must be there, and in .dockerignore with a `!`, got {', '.join(missing)}")
    if shutil.which("hadolint"):
        run("hadolint", "Dockerfile")
    check_apt(steps)
    check_pip(steps)
    run(sys.executable, "-m", "learner.cli", "--help")


if __name__ == "__main__":
    main()
