"""Rules of learner/model/fsdp.py: what a rank's memory does when a large block is freed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.seconds

BLOCKS = """
import ctypes, torch
from learner.model.fsdp import return_large_blocks

class Info(ctypes.Structure):  # of mallinfo2(3)
    _fields_ = [(name, ctypes.c_size_t) for name in
        ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
return_large_blocks()
torch.ones(2**23)  # after a block of 32 MB was freed, glibc keeps what is smaller
before = libc.mallinfo2().hblks
layers = [torch.ones(2**21 + 1) for _ in range(5)]
small = [torch.ones(2**10) for _ in range(5)]
held = libc.mallinfo2().hblks
del layers
print(held - before, libc.mallinfo2().hblks - before)
"""


def test_large_blocks_that_a_rank_frees_take_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "0"], "each has pages of its own, which are given back with it"
