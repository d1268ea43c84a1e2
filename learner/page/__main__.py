"""`python -m learner.page RUN ...`: the same as `understudy page`."""

from __future__ import annotations

import sys

from learner.page.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m learner.page"))
