"""Prints the requirements of pyproject.toml, one a line; arguments name extras. Used by setup.sh before anything is installed."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for line in project["dependencies"] + [r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra]]:
    print(line)
