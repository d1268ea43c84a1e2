"""A process that starts a fork server and forks from it, for tests/mocked_server/vllm/process/test_fork_server.py: one line of
JSON, then it waits."""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch

from configs import fork_server

IMPORTED_AT = time.monotonic()


def say_what_is_there(pipe):
    pipe.send(
        {
            "imported_at": sys.modules["__main__"].IMPORTED_AT,
            "late": os.environ.get("LATE"),
            "early": "EARLY" in os.environ,
            "threads": torch.get_num_threads(),
        }
    )
    pipe.recv()


def main():
    os.environ["EARLY"] = "1"
    fork_server.start()
    os.environ["LATE"] = "2"
    os.environ["OMP_NUM_THREADS"] = "3,2"
    del os.environ["EARLY"]
    context = fork_server.ending_with_us(multiprocessing.get_context("forkserver"), [])
    here, there = context.Pipe()
    child = context.Process(target=say_what_is_there, args=(there,))
    child.start()
    told = here.recv()
    victim = context.Process(target=time.sleep, args=(600,))
    victim.start()
    victim.kill()
    victim.join()
    parent = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
    told |= {
        "same": told.pop("imported_at") == IMPORTED_AT,
        "code": victim.exitcode,
        "server": parent,
        "child": child.pid,
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
