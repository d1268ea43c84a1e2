"""Rules of YAML that others wrote: what it stands for is bounded, however short it is, and an error is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.bounded_yaml import MAX_CHARACTERS, YamlError, parse_yaml, read_yaml
from configs.load import MAX_EXTENDED, ConfigError, load_config


def tenfold(line: str) -> str:
    """Eight levels, each ten times the one before."""
    return "run:\n  a0: &a0 {x: 1}\n" + "".join(
        line.format(level, ", ".join([f"*a{level - 1}"] * 10)) for level in range(1, 9)
    )


REFUSED = {
    "lists of lists": (tenfold("  a{0}: &a{0} [{1}]\n"), "at most 131072 characters, got more, by its aliases"),
    "merged mappings": (tenfold("  a{0}: &a{0} {{<<: [{1}], k: 1}}\n"), "got more, by its aliases"),
    "one long text": (f"run: [&a {'x' * 50_000}, *a, *a, *a]", "got more, by its aliases"),
    "names of keys": (f"run: {{? &a {'x' * 50_000}\n : 1, b: {{*a : 1}}, c: {{*a : 1}}}}", "got more, by its aliases"),
    "itself": ("run: &r {self: *r}", "must not hold itself, got *r within &r (line 1)"),
    "itself in a list": ("run:\n  name: &r [[*r]]", "must not hold itself, got *r within &r (line 2)"),
    "brackets": ("run: " + "[" * 5000, "nested at most 50 deep"),
    "indents": ("".join(" " * depth + "-\n" for depth in range(300)), "nested at most 50 deep (line 51)"),
    "digits": ("run: {seed: " + "9" * 5000 + "}", "at most 40 digits, got 5000"),
    "hexadecimal": ("run: {seed: 0x" + "f" * 5000 + "}", "at most 40 digits"),
    "base 60": ("run: {seed: 1" + ":59" * 3000 + "}", "at most 40 digits"),
    "base 60 with a fraction": ("run: {seed: 1" + ":59" * 3000 + ".5}", "too large"),
    "a day that is none": ("run: {name: 2001-99-99}", "month must be in 1..12"),
    "a tag": ("run: !!set {a}", "must have no tags"),
    "a number without digits": ("run: {seed: !!int ''}", "must have no tags"),
    "length": ("# " + "x" * MAX_CHARACTERS, "at most 131072 characters"),
    "no text": ("run: \udcff", "UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    text, words = REFUSED[name]
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(YamlError) as refused:
        read_yaml(file)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ConfigError) as told:
        load_config(file)
    assert str(file) in str(told.value) and "\n" not in str(told.value) and len(str(told.value)) < 1000


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "&r [*r]", "2001-99-99"])
def test_a_value_of_an_override_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match=r"learner.lr must have a YAML value, got '.{1,100}: ") as refused:
        load_config(overrides=[f"learner.lr={value}"])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


@pytest.mark.seconds
def test_names_and_aliases_of_people_are_read(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, x: 2}\ne: 1:30\n"
    assert parse_yaml(text) == {
        "a": {"x": 1, "y": [1, 2]},
        "b": {"x": 1, "y": [1, 2]},
        "c": {"x": 2, "y": [1, 2]},
        "e": 90,
    }
    most = "k: " + "x" * (MAX_CHARACTERS - 3)
    assert parse_yaml(most)["k"] == "x" * (MAX_CHARACTERS - 3)
    dense = "[" + "a," * (MAX_CHARACTERS // 2 - 1) + "]"
    assert len(parse_yaml(dense)) == MAX_CHARACTERS // 2 - 1


@pytest.mark.parametrize("names", [("a.yaml",), ("a.yaml", "b.yaml")])
def test_files_that_extend_one_another_are_refused_in_one_line(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, base in zip(names, (*names[1:], names[0]), strict=True):
        (tmp_path / name).write_text(f"extends: {base}\n")
    with pytest.raises(
        ConfigError, match=rf"extends must end after {MAX_EXTENDED} files, got .*a\.yaml -> "
    ) as refused:
        load_config(tmp_path / "a.yaml")
    assert "\n" not in str(refused.value)


def test_a_key_of_several_lines_is_told_in_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text('run: {"na\\nme": 1}')
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "config.yaml")
    assert "run.na\\nme" in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.symlink_to("/proc/self/mem")  # a file to those who ask, and an error to those who read
    with pytest.raises(ConfigError, match="must be YAML that can be read"):
        load_config(file)
