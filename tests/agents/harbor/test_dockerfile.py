"""Rules of the provider's Dockerfile reader: what a room can obey is read in order, everything else is refused by its line."""

from __future__ import annotations

import pytest

from agents.harbor.provider.understudy_dockerfile import Step, read_dockerfile


def steps(text: str) -> list[tuple[str, list[str]]]:
    found: list[Step] = read_dockerfile(text, variables={"PATH": "/bin"})
    return [(step.kind, step.words) for step in found]


def test_steps_are_read_in_order() -> None:
    text = """
# the image
FROM debian:stable AS base
LABEL a=b
ARG VERSION=3
ENV PATH="/opt/tool/bin:$PATH" NAME="two words"
ENV OLD way of it
WORKDIR /app
COPY --chmod=755 a.sh b.txt /opt/${VERSION}/
ADD ["c d", "/x"]
RUN apt-get update && \\
    # a comment inside
    echo done
RUN ["ls", "-l"]
USER root
CMD ["sleep"]
"""
    assert steps(text) == [
        ("env", ["VERSION", "3"]),
        ("env", ["PATH", "/opt/tool/bin:/bin"]),
        ("env", ["NAME", "two words"]),
        ("env", ["OLD", "way of it"]),
        ("workdir", ["/app"]),
        ("copy", ["a.sh", "b.txt", "/opt/3/"]),
        ("copy", ["c d", "/x"]),
        ("run", ["/bin/sh", "-c", "apt-get update &&      echo done"]),
        ("run", ["ls", "-l"]),
    ]


@pytest.mark.parametrize(
    "line",
    ["COPY --from=base /a /b", "ADD https://example.org/a /a", "RUN --mount=type=cache ls", "RUN <<END", "USER me", "SHELL [a]"],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(ValueError, match="is not obeyed here; use a provider that has docker"):
        steps(f"FROM a\n{line}\n")


def test_several_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="several stages"):
        steps("FROM a\nFROM b\n")
