"""What docs/deploy/, the Dockerfile and mkdocs.yml name is there, as far as that can be said without the tools that read them."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.load import load_config
from learner import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
_spec = importlib.util.spec_from_file_location("dockerfile", ROOT / "scripts/dockerfile.py")
assert _spec is not None and _spec.loader is not None
dockerfile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(dockerfile)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps() -> list[tuple[str, str]]:
    return dockerfile.instructions((ROOT / "Dockerfile").read_text())


def test_what_the_dockerfile_copies_is_there_and_sent():
    let_through = dockerfile.sent((ROOT / ".dockerignore").read_text())
    assert set(cli.PACKAGES) <= set(let_through)
    assert dockerfile.missing_files(steps(), let_through) == []
    assert dockerfile.missing_files([("COPY", "nowhere.txt ./")], let_through) == ["nowhere.txt", "nowhere.txt"]
    assert dockerfile.missing_files([("COPY", "Makefile ./")], let_through) == ["Makefile"], "not sent"


def test_the_dockerfile_names_our_command_extras_and_no_root():
    words = dict(steps())  # the last of each
    entry = yaml.safe_load(words["ENTRYPOINT"])
    assert entry[-1] in project()["scripts"] and words["USER"].split(":")[0] not in ("0", "root")
    (line,) = [words for step, words in steps() if step == "RUN" and "setup.sh" in words]
    extras = re.findall(r'"\$DEVICE" ([a-z ]*[a-z])', line)[0].split()
    assert {*extras, "cpu", "gpu"} <= set(project()["optional-dependencies"])
    assert "tini" in dockerfile.apt_packages(steps())


@pytest.mark.seconds
@pytest.mark.parametrize("words", [["venv", "tpu"], ["venv", "cpu", "nosuchextra"]])
def test_the_setup_refuses_what_it_does_not_know(tmp_path, words):
    done = subprocess.run(
        ["bash", ROOT / "scripts/setup.sh", tmp_path / words[0], *words[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and not (tmp_path / "venv").exists()
    assert ("must be cpu or gpu, got tpu" if "tpu" in words else "nosuchextra") in done.stderr


def commands() -> dict[str, str]:
    """File -> its line that starts a run."""
    texts = {path.name: path.read_text() for path in sorted(DEPLOY.iterdir())}
    return {
        name: line
        for name, text in texts.items()
        for line in text.splitlines()
        if "understudy run" in line and "#" not in line
    }


def test_every_file_starts_a_run_that_our_command_line_takes():
    assert set(commands()) == {path.name for path in DEPLOY.iterdir()}
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--config")
    parser.add_argument("overrides", nargs="*")
    for name, line in commands().items():
        words = shlex.split(line.partition("understudy ")[2])
        assert words[0] in cli.COMMANDS, name
        given = parser.parse_args([word for word in words[1:] if word != "$@"])
        assert given.resume == "auto" and given.overrides == [], name


def test_the_keys_and_configurations_in_an_example_line_are_ours():
    text = (DEPLOY / "slurm.sh").read_text()
    (words,) = re.findall(r"^#   sbatch .*slurm\.sh (.*)$", text, flags=re.M)
    config, name, *overrides = shlex.split(words)
    assert config == "--config"
    assert load_config(Path(name), overrides).run.name == "first"


def test_the_pods_have_the_ray_of_this_project_and_the_image_that_is_built():
    job = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    assert cluster["authOptions"]["mode"] == "token"
    pods = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    (user,) = {int(words.split(":")[0]) for step, words in steps() if step == "USER"}
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsUser"] == user
        assert f"--tag {pod['spec']['containers'][0]['image']} " in (ROOT / "Dockerfile").read_text()
        mounted = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {"/work", "/dev/shm"}


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav if isinstance(nav, list) else list(nav.values())  # type: ignore[attr-defined]
    return [page for entry in entries for page in pages_of(entry)]


def test_every_page_is_in_the_sites_navigation_once():
    nav = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = [path.relative_to(ROOT).as_posix() for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md")]
    assert sorted(nav) == sorted(pages)
