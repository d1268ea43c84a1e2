"""`python -m learner.page RUN ...`: the same as `understudy page`."""

from __future__ import annotations

import sys

from buffers.terminal import guard_output
from learner.page.command_line import main

if __name__ == "__main__":
    guard_output()
    sys.exit(main(sys.argv[1:], program="python -m learner.page"))
