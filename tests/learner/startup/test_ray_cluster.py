"""Rules of learner/startup/ray_cluster.py, with a real Ray: it answers only who has its token, and its files are its
user's alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.node import Node

from buffers.errors import UnderstudyError
from configs.child_processes import MAX_CHARS
from learner.startup import ray_cluster
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
ASKING = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"", 10)
except AuthenticationError:
    print("refused")
else:
    print("answered")
"""
TWICE = """
import json
from learner.startup import ray_cluster as cluster
seen = []
for _ in range(2):
    cluster.start("")
    seen.append((str(cluster._folder), (cluster._folder / "token").read_text()))
    cluster.stop()
print(json.dumps(seen))
"""

SLOW_AGENT = """
import os, sys, time
is_agent = any(word.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for word in sys.orig_argv)
while is_agent and not os.path.exists(os.environ["AGENTS_MAY_START"]):
    time.sleep(0.05)
"""
WITH_SLOW_AGENTS = """
import os
from pathlib import Path
import ray
from learner.startup import ray_cluster as cluster
cluster.start("")
print(ray.nodes()[0]["Alive"])
ports = {path.name.rpartition("_")[0] for path in cluster._folder.glob("ray/session_*/*_port_*")}
print("runtime_env_agent_port" in ports)
Path(os.environ["AGENTS_MAY_START"]).touch()
class Actor:
    def answer(self):
        return "answered"
print(ray.get(ray.remote(num_cpus=0)(Actor).remote().answer.remote(), timeout=300))
cluster.stop()
"""

ON_A_TAKEN_PORT = """
import logging, socket, sys
from ray._private.node import Node
from buffers.errors import UnderstudyError
from configs.child_processes import MAX_CHARS
from learner.startup import ray_cluster as cluster
logging.basicConfig(level="INFO", stream=sys.stderr)
start, taken = Node.start_ray_processes, socket.create_server(("", 0))
def start_on_a_taken_port(node):
    node._ray_params.node_manager_port = taken.getsockname()[1]
    start(node)
Node.start_ray_processes = start_on_a_taken_port
try:
    cluster.start("")
except UnderstudyError as error:
    print(error)
cluster.stop()
"""

AFTERWARDS = """
import ray
from learner.startup import ray_cluster as cluster
cluster.start("")
cluster.stop()
ray.init(address="local", include_dashboard=False, num_cpus=1)
class Actor:
    def answer(self):
        return "answered"
print(ray.get(ray.remote(num_cpus=0)(Actor).remote().answer.remote(), timeout=300))
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its folder. The user has a token of another Ray, and has turned tokens off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ray_cluster.TOKEN, "another")
        patch.setenv(ray_cluster.MODE, "disabled")
        ray_cluster.start("")
        try:
            assert (os.environ[ray_cluster.TOKEN], os.environ[ray_cluster.MODE]) == ("another", "disabled")
            assert ray_cluster.TOKEN_PATH not in os.environ
            assert ray_cluster._folder is not None
            yield ray_cluster._folder
        finally:
            ray_cluster.stop()


def ask(environment: dict[str, str], *, home: Path) -> str:
    """What another process of this user is told."""
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", ASKING, address], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
    )  # fmt: skip
    return done.stdout.strip() or done.stderr


@pytest.mark.seconds
def test_who_has_no_token_is_refused(started: Path, tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of all runs of this user")
    assert ask({}, home=tmp_path) == "refused"
    assert ask({ray_cluster.MODE: "token"}, home=tmp_path) == "refused"
    assert ask({ray_cluster.MODE: "token", ray_cluster.TOKEN: "another"}, home=tmp_path) == "refused"
    assert ask({ray_cluster.MODE: "token", ray_cluster.TOKEN_PATH: str(started / "token")}, home=tmp_path) == "answered"


JOINING = """
from buffers.errors import UnderstudyError
from learner.startup import ray_cluster as cluster
try:
    print("joined", cluster.start(""))
except UnderstudyError as error:
    print(error)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("token", "words"),
    [
        ({}, "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN are not both set"),
        ({ray_cluster.MODE: "token", ray_cluster.TOKEN: "another"}, "RAY_AUTH_TOKEN is not its"),
    ],
)
def test_a_cluster_that_asks_for_another_token_says_so(started: Path, token: dict[str, str], words: str) -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", JOINING], capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT,
        env={"PATH": os.environ["PATH"], "RAY_ADDRESS": address, **token},
    )  # fmt: skip
    assert f"{address} asks for a token, and {words}; set those of `ray start`" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("address", "mode", "is_open"),
    [
        ("10.0.0.1:6379", "", True),
        ("ray://10.0.0.1:10001", "disabled", True),
        ("10.0.0.1:6379", "token", False),
        ("127.0.0.1:6379", "", False),
    ],
)
def test_a_cluster_that_others_reach_and_that_asks_for_no_token_gets_a_line(
    monkeypatch, address, mode, is_open
) -> None:
    monkeypatch.setenv(ray_cluster.MODE, mode)
    told = ray_cluster._open_to_all(address)
    assert (f"the Ray cluster at {address} asks for no token" in told) == is_open == bool(told)


def test_its_folder_and_its_token_are_its_users_alone(started: Path) -> None:
    assert stat.S_IMODE(started.stat().st_mode) == 0o700
    assert stat.S_IMODE((started / "token").stat().st_mode) == 0o600
    assert list((started / "ray").glob("session_*/sockets/*")), "Ray's sockets are elsewhere"
    if os.geteuid() == 0:
        looking = ["ls", str(started / "ray")]
        done = subprocess.run(
            looking, capture_output=True, text=True, user=65534, group=65534, extra_groups=[], check=False
        )
        assert "Permission denied" in done.stderr


@pytest.mark.seconds
def test_its_workers_have_the_token_and_no_copy_of_it_is_in_their_environment(started: Path) -> None:
    @ray.remote
    def environment() -> dict[str, str]:
        return dict(os.environ)

    seen = ray.get(environment.remote(), timeout=PATIENCE_S)
    token = (started / "token").read_text()
    assert seen[ray_cluster.TOKEN_PATH] == str(started / "token") and ray_cluster.TOKEN not in seen
    assert len(token) == 64 and token not in json.dumps(seen)


@pytest.mark.seconds
def test_its_workers_have_as_much_of_a_busy_machine_as_who_starts_them(started: Path) -> None:
    @ray.remote
    def niceness() -> int:
        return os.nice(0)

    assert ray.get(niceness.remote(), timeout=PATIENCE_S) == os.nice(0)


def test_daemons_that_nothing_asks_are_not_started(started: Path) -> None:
    commands = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # another's, which has ended; a zombie counts
            commands.append(" ".join(child.cmdline()))
    own = [command for command in commands if str(started) in command]
    assert any("gcs_server" in command for command in own) and any("raylet" in command for command in own)
    assert not [command for command in own if any(name in command for name in ("monitor", "dashboard.py"))]
    for name in ray_cluster.UNUSED_DAEMONS:  # those whom this process starts Ray for later get them
        assert getattr(Node, name).__name__ == name


@pytest.mark.seconds
def test_each_start_has_its_own_token_and_the_end_removes_its_folder() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment
    )
    (one, first), (two, second) = json.loads(done.stdout)
    assert first != second and one != two
    assert not Path(one).exists() and not Path(two).exists()


@pytest.mark.seconds
def test_its_process_may_have_a_ray_without_tokens_afterwards() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment[ray_cluster.MODE] = "disabled"
    told = subprocess.run(
        [sys.executable, "-c", AFTERWARDS], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    assert told.stdout.split() == ["answered"], told.stderr[-2000:]


@pytest.mark.seconds
@pytest.mark.parametrize("num_chars", [MAX_CHARS, MAX_CHARS + 1])
def test_sockets_have_room_whatever_the_length_of_the_folder_for_temporary_files(num_chars: int) -> None:
    place = Path("/tmp", "t" * (num_chars - len("/tmp/")))
    place.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "TMPDIR": str(place)},
        )  # fmt: skip
        (one, _), _ = json.loads(done.stdout)
        assert (Path(one).parent == place) == (num_chars == MAX_CHARS), done.stderr[-2000:]
    finally:
        shutil.rmtree(place)


def test_a_ray_that_does_not_start_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(UnderstudyError, match=r"Ray must start .* timed out during startup\. End other programs"):
        ray_cluster.start("")
    folder = ray_cluster._folder
    ray_cluster.stop()
    assert folder is not None and not folder.exists()


@pytest.mark.seconds
def test_agents_that_are_slow_to_start_are_not_waited_for(tmp_path: Path) -> None:
    """Ray's raylet would end after 15 s, and its driver give up after 30."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENT)
    more = {"AGENTS_MAY_START": str(tmp_path / "now"), "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", WITH_SLOW_AGENTS], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **more}, check=False
    )  # fmt: skip
    assert told.stdout.split() == ["True", "False", "answered"], told.stderr[-2000:]


@pytest.mark.seconds
def test_a_raylet_that_ends_is_told_of_with_its_last_words() -> None:
    told = subprocess.run([sys.executable, "-c", ON_A_TAKEN_PORT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("Ray must start on this machine, but did not: its raylet ended with code")
    assert "raylet.err of Ray ended with" in told.stderr and "The specified port is" in told.stderr


def test_a_node_that_is_not_there_or_not_alive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": f"10.0.0.{n}", "NodeManagerHostname": "twins", "Alive": n != 3}
        for n, name in enumerate(("one", "two", "gone"), start=1)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert ray_cluster.find_node("10.0.0.2") == ("two", "10.0.0.2")
    known = r"set it to one of one \(10\.0\.0\.1\), two \(10\.0\.0\.2\)"
    for name, number in (("elsewhere", 0), ("gone", 0), ("twins", 2)):
        with pytest.raises(UnderstudyError, match=f"got '{name}' for {number} of them; {known}"):
            ray_cluster.find_node(name)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            "",
            "buffer.node=elsewhere must be of a running Ray cluster, but none can be joined: RAY_ADDRESS names none, and",
        ),
        ("auto", "buffer.node=elsewhere must be .*`ray start` has started none on this machine"),
        ("127.0.0.1:1", "127.0.0.1:1 cannot be reached: .*refused"),
        ("ray://127.0.0.1:1", "ray://127.0.0.1:1 cannot be reached"),
        ("127.0.0.1", "127.0.0.1 is not HOST:PORT"),
        ("127.0.0.1:port", "127.0.0.1:port is not HOST:PORT"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_of_at_once_whatever_else_runs_here(
    started: Path, monkeypatch: pytest.MonkeyPatch, named: str, says: str
) -> None:
    """The Ray of another run is `started`; of this machine's `ray start` nothing may be known."""
    monkeypatch.setattr(ray_cluster, "find_bootstrap_address", lambda _: None)
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(UnderstudyError, match=says):
        ray_cluster.start("elsewhere")
