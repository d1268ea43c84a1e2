"""Ray for a test: started as a run starts its own, with a token that no other test's Ray has.

Without a token of its own, Ray makes one for the user at its first start: two tests that start Ray at once on a machine without
one each make one, and the workers of the first are then refused by it, which waits for them for ever.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.authentication.authentication_token_setup import _get_default_token_path, generate_and_save_token

from learner.startup import ray_cluster


@contextmanager
def own_ray(**resources: int) -> Iterator[None]:
    """Ray on this machine, with these `num_cpus` and `num_gpus`; it ends with the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", partial(ray.init, **resources))
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            ray_cluster.start("")
            yield
        except BaseException:
            _tell_what_it_did()
            raise
        finally:
            ray_cluster.stop()


def _tell_what_it_did() -> None:
    """Its processes, each with its seconds of a processor, and the end of each of its logs: they are gone with the test."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times, words = process.cpu_times(), " ".join(process.cmdline())[:120]
            print(f"{process.pid} {process.status()} {times.user + times.system:.1f} s: {words}")
    folder = ray_cluster._folder
    for path in sorted(folder.glob("ray/session_latest/logs/**/*")) if folder else []:
        if path.is_file() and (text := path.read_text(errors="replace").strip()):
            print(f"--- {path.name}\n{text[-1500:]}")


def make_users_token() -> None:
    """The token that Ray makes for this user where there is none, made by one process at a time."""
    with (Path(tempfile.gettempdir()) / "understudy-tests-ray-token.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _get_default_token_path().exists():
            generate_and_save_token()
