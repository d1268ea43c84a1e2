"""Every block of README.md and docs/ does what its page says; and a page on which one does not is found."""

from __future__ import annotations

import re

import pytest

from tests.documents.blocks import PAGES, ROOT, blocks_of
from tests.documents.play import WrongPage, play

PLAYED = [page for page in PAGES if any("not run" not in block.said for block in blocks_of(page))]
WITHOUT_ENGINE = ("docs/gpus.md",)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in WITHOUT_ENGINE else [pytest.mark.engine])
        for page in PLAYED
        if page != "README.md"  # test_readme.py
    ],
)
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_page_does_what_it_says(page, tmp_path):
    for _ in play(page, folder=tmp_path):
        pass


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_played_or_says_why_not(page):
    for block in blocks_of(page):
        assert block.said.get("not run") or block.name or block.commands or block.output, block.place


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page):
    """Fences and indented lines are all in a block."""
    source = "".join(f"{block.text}\n" for block in blocks_of(page))
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * sum(1 for block in blocks_of(page) if f"```{block.kind}\n{block.text}```" in text)
    for line in re.findall(r"\n\n {4}(\S[^\n]*)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        assert line in source, f"{page}: {line}"


FILES = """\
```python
# ok.py
print("a 1.5 s")
```

```yaml
# ok.yaml: a comment
key: value
```
"""


def outcomes(text, folder):
    return [played.outcome for played in play("a page", folder=folder, text=text)]


def test_files_commands_and_outputs_are_played_in_the_pages_order(tmp_path):
    text = f"""{FILES}
    python ok.py > here.txt
    cat here.txt ok.yaml

```text
a 1.5 s
# ok.yaml: a comment
...
```

<!-- figures vary -->
```text
$ python ok.py
a 2,000e-3 s
```

<!-- not run: it needs a GPU -->
```bash
nvidia-smi
```
"""
    assert outcomes(text, tmp_path) == ["file", "file", "ran", "output", "ran", "not run"]
    assert (tmp_path / "here" / "ok.py").read_text() == '# ok.py\nprint("a 1.5 s")\n', "the block's bytes"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```bash\npython missing.py\n```\n", "its exit code is 2"),
        ("```bash\nfalse\ntrue\n```\n", "its exit code is 1"),  # its first command fails, not its last one
        ("```text\n$ echo other\nthis\n```\n", "it says"),
        ("```text\nprinted by nobody\n```\n", "no command before it printed this"),
        ("```bash\necho a\necho b\n```\n\n```text\na\n```\n", "it says"),  # a line is left out without `...`
        ("<!-- exits with 3 -->\n```bash\nexit 4\n```\n", "its exit code is 4"),
        ("```yaml\nkey: value\n```\n", "neither a file nor a command"),
        ("<!-- until: never -->\n```bash\necho a\n```\n", "ended without 'never'"),
        (
            "```bash\necho b > ok.py\n```\n\n```python\n# ok.py\nprint()\n```\n",
            "ok.py was written by a command before, and differs",
        ),
    ],
)
def test_a_block_that_does_not_do_what_the_page_says_is_named(tmp_path, text, told):
    with pytest.raises(WrongPage, match=r"a page:[0-9]+: ") as wrong:
        outcomes(text, tmp_path)
    assert told in str(wrong.value)


def test_a_program_goes_on_beside_what_follows_until_the_pages_end(tmp_path):
    text = """\
```python
# serving.py
import pathlib, time

print("ready", flush=True)
try:
    while not pathlib.Path("asked").exists():
        time.sleep(0.01)
    pathlib.Path("answered").touch()
    time.sleep(3600)
except KeyboardInterrupt:
    pathlib.Path("stopped").touch()
```

<!-- meanwhile, from: ready -->
```bash
exec python serving.py
```

```bash
touch asked
until [ -f answered ]; do sleep 0.01; done
```

<!-- until: ready -->
```bash
exec python serving.py
```
"""
    text = text.replace("touch asked\nuntil", "[ ! -f stopped ]\ntouch asked\nuntil")
    assert outcomes(text, tmp_path) == ["file", "ran", "ran", "ran"]
    assert (tmp_path / "here" / "stopped").exists()


def test_a_comment_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"must be one of .*'not run'.*got 'not ran: x'"):
        blocks_of("a page", text="<!-- not ran: x -->\n```bash\ntrue\n```\n")
