"""The command line: `python -m tests.documents [PAGE ...]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.documents.blocks import PAGES
from tests.documents.play import WrongPage, play


def main() -> int:
    """Exit codes: 0 every block does what its page says, 1 one does not."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.documents", description="Play the blocks of pages as they stand."
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", default=PAGES, help="such as docs/agents.md (default: all)")
    outcomes, wrong = Counter[str](), 0
    for page in parser.parse_args().pages:
        with tempfile.TemporaryDirectory(prefix="understudy-page-") as folder:
            try:
                for played in play(page, folder=Path(folder)):
                    outcomes[played.outcome] += 1
                    reason = f": {played.block.said['not run']}" if played.outcome == "not run" else ""
                    print(f"{played.block.place}  {played.outcome}{reason}  {played.seconds:.1f} s", flush=True)
            except WrongPage as error:
                wrong += 1
                print(f"WRONG {error}", flush=True)
    print(
        f"{outcomes['ran']} blocks run, {outcomes['file']} files used as they stand, {outcomes['output']} outputs compared, "
        f"{outcomes['not run']} blocks not run, 0 rewritten, {wrong} wrong"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
