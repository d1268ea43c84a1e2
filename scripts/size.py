"""Prints how many lines of Python there are, as CONTRIBUTING counts them.

`python scripts/size.py`; the architecture test holds `MOST` and `MOST_WITH_BENCHMARKS`.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("agents", "buffers", "configs", "env_adapters", "learner", "mocked_server")
BESIDE = ("benchmarks", "scripts")
MOST, MOST_WITH_BENCHMARKS = 63_120, 72_000
"""Lines of the product, and of all Python but the tests. A change that raises one says in CHANGELOG what it bought."""


def lines_of(*folders: str) -> dict[Path, int]:
    """File -> its lines, empty ones and comments among them, of the Python files of these folders."""
    return {
        path: path.read_text(encoding="utf-8").count("\n")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def main() -> None:
    """Each folder, the product, and all of it."""
    for folder in (*PRODUCT, *BESIDE):
        sizes = lines_of(folder)
        print(f"{folder:<16}{len(sizes):>5} files{sum(sizes.values()):>8,} lines")
    for name, folders, most in (
        ("product", PRODUCT, MOST),
        ("with benchmarks", PRODUCT + BESIDE, MOST_WITH_BENCHMARKS),
    ):
        sizes = lines_of(*folders)
        print(f"{name:<16}{len(sizes):>5} files{sum(sizes.values()):>8,} lines of {most:,} at most")


if __name__ == "__main__":
    main()
