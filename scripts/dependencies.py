"""Prints requirements for pip, one a line. Called by setup.sh, in an environment that may still be empty.

dependencies.py EXTRA ...                            of this project, with these extras of pyproject.toml
dependencies.py --of PACKAGE ... --without NAME ...  of packages that are installed, but for these names
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def of_project(extras: list[str]) -> list[str]:
    """What the project needs, with these extras. Exits with a line for one that it has not."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    if unknown := set(extras) - set(project["optional-dependencies"]):
        sys.exit(
            f"an extra must be one of {', '.join(project['optional-dependencies'])}, got {', '.join(sorted(unknown))}"
        )
    found: list[str] = project["dependencies"] + [
        r for extra in extras for r in project["optional-dependencies"][extra]
    ]
    return found


def of_installed(packages: list[str], *, without: list[str]) -> list[str]:
    """What these packages need; markers stay on the lines for pip to judge, requirements of their extras are left out."""
    lines = [line for package in packages for line in requires(package) or () if "extra ==" not in line]
    return [line for line in lines if re.split(r"[^\w.-]", line)[0].lower() not in without]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print requirements for pip, one a line.")
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml")
    parser.add_argument("--of", nargs="+", metavar="PACKAGE", help="print what installed packages need instead")
    parser.add_argument("--without", nargs="+", metavar="NAME", default=[], help="with --of: leave these out")
    arguments = parser.parse_args()
    found = of_installed(arguments.of, without=arguments.without) if arguments.of else of_project(arguments.extras)
    print("\n".join(found))


if __name__ == "__main__":
    main()
