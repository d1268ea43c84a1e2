"""YAML file + dotted overrides -> `Config`, with errors that name key, rule, value and remedy in one line each.

`extends: other.yaml` at the top of a file takes that file (same folder, or shipped) as the base. A `learner.recipe` in a later
layer (a file that extends another, or the command line) takes the place of the algorithm in the layers below it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.bounded_yaml import YamlError, parse_yaml, read_yaml
from configs.keys import all_keys, all_sections, keys_below, nearest_key
from configs.recipes import SYSTEM_KEYS
from configs.schema import Config

FOLDER = Path(__file__).resolve().parent
PACKAGES = "{understudy}"
"""Stands in a value for the folder of our packages, so that what is shipped is found from any folder."""
DEFAULT = FOLDER / "demo.yaml"
MAX_EXTENDED = 8
HARBOR_AGENT = "terminus-2"
"""The agent of `env: harbor`: the one of Harbor's that runs outside of the task's environment."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is for the user."""


def load_config(path: Path = DEFAULT, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, or what is shipped by that name, apply overrides such as `learner.kl.coef=0.1` (values in YAML), validate.

    Raises ConfigError.
    """
    tree = _read(_shipped(path))
    if any(_names_recipe(text) for text in overrides):
        tree = _without_algorithm(tree)
    for text in overrides:
        _override(tree, text)
    checked = _check_keys(_filled(tree), prefix="", source=path)
    try:
        return Config.model_validate(checked)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error.errors()))) from None


def _shipped(path: Path) -> Path:
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


def _read(path: Path, *, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    if len(above) > MAX_EXTENDED:
        raise ConfigError(
            f"extends must end after {MAX_EXTENDED} files, got {' -> '.join(map(str, above[:3]))} -> ...; take one out"
        )
    if not path.is_file():
        name = f"extends in {above[-1]}" if above else "--config"
        shipped = ", ".join(sorted(p.name for p in FOLDER.glob("*.yaml")))
        raise ConfigError(f"{name} must name a YAML file, got {path} (not a file); shipped in configs/: {shipped}")
    try:
        tree = read_yaml(path) or {}
    except (YamlError, OSError) as error:
        raise ConfigError(f"{path} must be YAML that can be read: {error}") from None
    if isinstance(tree, dict) and tree.get("env") == "harbor":
        tree["env"] = {"harbor": {"agent": HARBOR_AGENT}}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections (run:, model:, ...), got {type(tree).__name__}")
    base = tree.pop("extends", None)
    if not base:
        return tree
    beside, learner = path.parent / str(base), tree.get("learner")
    below = _read(beside if beside.is_file() else _shipped(Path(str(base))), above=(*above, path))
    named = isinstance(learner, dict) and learner.get("recipe")
    return _merge(_without_algorithm(below) if named else below, tree)


def _names_recipe(override: str) -> bool:
    key, _, value = (part.strip() for part in override.partition("="))
    return key == "learner.recipe" and value not in ("", "null", "~")


def _without_algorithm(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with those keys of the learner alone that no recipe sets."""
    learner = tree.get("learner")
    if not isinstance(learner, dict):
        return tree
    return {**tree, "learner": {key: value for key, value in learner.items() if key in SYSTEM_KEYS}}


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = (part.strip() for part in text.partition("="))
    parts = key.split(".")
    if not equals or not all(parts) or (len(parts) < 2 and key not in all_keys()):
        raise ConfigError(
            f"an override must look like section.key=value, got {text!r:.300}; for example learner.lr=1e-4"
        )
    _check_name(key, source="an override")
    section = tree
    for depth, part in enumerate(parts[:-1], 1):
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise _not_a_section(".".join(parts[:depth]), section)
    try:
        new = parse_yaml(value)
    except YamlError as error:
        raise ConfigError(f"{key} must have a YAML value, got {value!r:.100}: {error}") from None
    old = section.get(parts[-1])
    if key in all_sections() and isinstance(old, dict) and isinstance(new, dict):
        new = _merge(old, new)
    section[parts[-1]] = new


def _check_keys(tree: dict[str, Any], *, prefix: str, source: Path) -> dict[str, Any]:
    """The same tree with nothing in place of a value (`key:`, `key=`) read as the key's empty value. Raises ConfigError."""
    checked: dict[str, Any] = {}
    for part, value in tree.items():
        name = f"{prefix}{part}"
        if "." in str(part):
            raise ConfigError(f"{name} must be written in sections in a file, got one key with dots in {source.name}")
        _check_name(name, source=f"{source.name} or an override")
        if name in all_sections():
            if not isinstance(value, dict):
                raise _not_a_section(name, value)
            checked[part] = _check_keys(value, prefix=f"{name}.", source=source)
            continue
        key = all_keys()[name]
        is_number = ("integer" in key.kind or "number" in key.kind) and "true or false" not in key.kind
        if is_number and _has_boolean(value) and not (value is False and "False" in key.kind):
            raise ConfigError(
                f"{name} must be {key.kind}, got {value!r:.300} (yes and on are true in YAML, no and off false)"
            )
        if value is None and key.empty is ...:
            raise ConfigError(
                f"{name} must have a value ({key.kind}), got nothing; set {name}={key.default_text} or another one"
            )
        checked[part] = key.empty if value is None else value
    return checked


def _has_boolean(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bool) or any(map(_has_boolean, inner))


def _check_name(name: str, *, source: str) -> None:
    if name in all_keys() or name in all_sections():
        return
    parts = name.split(".")
    outer = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    if whole := next((each for each in outer if each in all_keys()), None):
        hint = f"{whole} is one value, {all_keys()[whole].kind}: set {whole}=<value>"
    else:
        hint = nearest_key(name)
    said = name if name.isprintable() else repr(name)
    raise ConfigError(f"{said:.300} is not a configuration key ({source}); {hint:.500}")


def _not_a_section(name: str, value: object) -> ConfigError:
    inside = [key.name for key in keys_below(name)]
    return ConfigError(
        f"{name} must be a section with the keys {', '.join(inside)}, got {'nothing' if value is None else repr(value):.300}; "
        f"set {inside[0]}=<value>, for example"
    )


def _lines(errors: Sequence[Any]) -> list[str]:
    """One line for each key; a value that fits none of several types breaks a rule of each of them."""
    rules: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    near: dict[str, list[str]] = {}
    for error in errors:
        parts = [str(part) for part in error["loc"]]
        key = next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in all_keys()), "")
        rule = re.sub("(Input|String) should", "must", str(error["msg"])).replace("Value error, ", "")
        rest = error["loc"][key.count(".") + 1 :] if key else ()
        place = f" (entry {rest[0] + 1})" if rest and type(rest[0]) is int else ""
        if error["type"] == "literal_error":
            options = re.findall("'([^']+)'", str(error["ctx"]["expected"]))
            near[key] = difflib.get_close_matches(str(error["input"]), options, n=1)
        rules.setdefault(key, []).append(rule + place)
        values[key] = f"{error['input']!r:.300}"
    meant = {key: f"did you mean {names[0]}? " for key, names in near.items() if names}
    return [
        " or ".join(rule)
        if not key
        else f"{key} {' or '.join(rule)}, got {values[key]}; {meant.get(key, '')}set {key}=<value> or edit the file"
        for key, rule in rules.items()
    ]
