"""YAML file + dotted overrides -> `Config`, with errors that name key, rule, value and remedy in one line each.

`extends: other.yaml` at the top of a file takes that file (same folder) as the base.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.schema import Config

FOLDER = Path(__file__).resolve().parent
PACKAGES = "{understudy}"
"""In a value: the folder that our packages lie in, so that what is shipped is found from any folder."""
DEFAULT = FOLDER / "demo.yaml"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is for the user."""


def load_config(path: Path = DEFAULT, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `section.key=value` overrides (values in YAML), validate. Raises ConfigError."""
    tree = _read(path)
    for text in overrides:
        _override(tree, text)
    tree = _filled(tree)
    _check_keys(tree, Config, prefix="", source=path)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error.errors()))) from None


def shipped(path: Path) -> Path:
    """The file; the shipped configuration of this name where there is no such file."""
    named = FOLDER / f"{path.name.removesuffix('.yaml')}.yaml"
    by_name = str(path) in (path.stem, path.name, f"configs/{path.name}")
    return named if by_name and not path.is_file() and named.is_file() else path


def _filled(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(PACKAGES, str(FOLDER.parent))
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return {key: _filled(item) for key, item in value.items()} if isinstance(value, dict) else value


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        shipped = ", ".join(sorted(p.name for p in FOLDER.glob("*.yaml")))
        raise ConfigError(f"--config must name a YAML file, got {path} (not a file); shipped in configs/: {shipped}")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be YAML: {str(error).replace(chr(10), ' ')}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections (run:, model:, ...), got {type(tree).__name__}")
    base = tree.pop("extends", None)
    return _merge(_read(path.parent / str(base)), tree) if base else tree


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise ConfigError(f"an override must look like section.key=value, got {text!r}; for example learner.lr=1e-4")
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"{parts[0]} must be a section, got {section!r}")
    try:
        section[parts[1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key} must have a YAML value, got {value!r}: {str(error).splitlines()[0]}") from None


def _check_keys(tree: dict[str, Any], model: type[BaseModel], *, prefix: str, source: Path) -> None:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in model.model_fields:
            near = difflib.get_close_matches(str(key), list(model.model_fields), n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(model.model_fields)}"
            raise ConfigError(f"{name} is not a configuration key ({source.name} or an override); {hint}")
        inner = model.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not isinstance(value, dict):
                raise ConfigError(f"{name} must be a section with keys {', '.join(inner.model_fields)}, got {value!r}")
            _check_keys(value, inner, prefix=f"{name}.", source=source)


def _lines(errors: Sequence[Any]) -> list[str]:
    """One line for each key; a value that fits none of several types breaks a rule of each of them."""
    rules: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for error in errors:
        key = ".".join(str(part) for part in error["loc"][:2])
        rule = str(error["msg"]).replace("Input should be", "must be").replace("Value error, ", "")
        place = f" (entry {error['loc'][2] + 1})" if len(error["loc"]) > 2 and type(error["loc"][2]) is int else ""
        rules.setdefault(key, []).append(rule + place)
        values[key] = repr(error["input"])
    return [
        " or ".join(rule)
        if not key
        else f"{key} {' or '.join(rule)}, got {values[key]}; set {key}=<value> or edit the file"
        for key, rule in rules.items()
    ]
