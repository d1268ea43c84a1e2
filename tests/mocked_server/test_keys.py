"""Rules of mocked_server/keys.py: each key opens one thing, as a whole and nothing but it."""

from __future__ import annotations

import hmac
import os
import stat
from itertools import combinations
from pathlib import Path

import pytest

from mocked_server import keys
from mocked_server.keys import (
    KeyRing,
    OwnedEpisode,
    SecretError,
    make_secret,
    process_secret,
    read_secret,
    round_secret,
    secret_of_run,
    wire_secret,
)
from tests.support.faults.disks import NEEDS_ROOT, small_disk

SECRET = bytes(range(32))


def test_the_command_makes_the_folder_and_says_in_a_line_what_is_in_its_way(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert keys.main(["runs/server.key"]) == 0
    made = read_secret(tmp_path / "runs" / "server.key")
    assert keys.main(["runs/server.key"]) == 0 and read_secret(tmp_path / "runs" / "server.key") == made
    for words, code, told in (
        (["--help"], 0, ""),
        ([], 2, "FILE"),
        (["runs/server.key/below"], 2, "must be a file that can be written"),
        (["runs"], 2, "must be a file that can be written"),
    ):
        with pytest.raises(SystemExit) as ended:
            keys.main(words)
        assert ended.value.code == code and told in capsys.readouterr().err
    (tmp_path / "short").write_bytes(b"1")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(SystemExit):
        keys.main(["short"])
    assert "must hold 32 random bytes" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "short"]


def opens(ring: KeyRing, key: str) -> list[str]:
    """What this key is good for."""
    found = [name for name in ("scorer", "admin", "worker") if ring.same(key, getattr(ring, name))]
    if (worker := ring.worker_of(key)) is not None:
        found.append(f"worker {worker!r}")
    if (episode := ring.episode_of(key)) is not None:
        found.append(f"episode {episode}")
    return found


def all_keys(ring: KeyRing) -> dict[str, str]:
    return {
        "episode": ring.episode_key("1-0-0"),
        "worker": ring.worker_key("w-1"),
        "nobody's": ring.worker,
        "scorer": ring.scorer,
        "admin": ring.admin,
    }


def test_each_key_opens_its_own_and_no_other() -> None:
    ring = KeyRing(SECRET)
    assert {name: opens(ring, key) for name, key in all_keys(ring).items()} == {
        "episode": ["episode 1-0-0"],
        "worker": ["worker 'w-1'"],
        "nobody's": ["worker", "worker ''"],
        "scorer": ["scorer"],
        "admin": ["admin"],
    }


@pytest.mark.parametrize("name", ["episode", "worker", "nobody's", "scorer", "admin"])
def test_a_key_that_is_cut_or_goes_on_opens_nothing(name: str) -> None:
    ring = KeyRing(SECRET)
    key = all_keys(ring)[name]
    body, _, digest = key.rpartition("-")
    for wrong in (
        *(f"{body}-{digest[:length]}" for length in range(len(digest))),
        key + "0", key + digest, body, "", "-", digest, key.upper(), key[1:], key + "\n", f"x{key}",
    ):  # fmt: skip
        assert opens(ring, wrong) == [], wrong


def test_digests_are_long_and_no_two_kinds_share_one() -> None:
    ring = KeyRing(SECRET)
    digests = [key.rpartition("-")[2] for key in (*all_keys(ring).values(), ring.episode_key("1-0-1"))]
    assert all(len(digest) == 32 and set(digest) <= set("0123456789abcdef") for digest in digests)
    assert all(one != two for one, two in combinations(digests, 2))
    assert ring.episode_key("").count("-") == 2 and opens(ring, ring.episode_key("")) == []


def test_what_server_processes_prove_follows_from_the_runs_secret_and_is_not_it() -> None:
    one, other = process_secret(bytes(32)), process_secret(bytes([1] * 32))
    assert len(one) == len(other) == 32 and len({one, other, bytes(32), bytes([1] * 32)}) == 4
    assert process_secret(bytes(32)) == one


def test_a_key_ends_with_the_digest_of_its_purpose_under_the_secret() -> None:
    ring = KeyRing(SECRET)
    assert ring.secret == SECRET
    assert ring.scorer == "us-scorer-" + hmac.digest(SECRET, b"scorer", "sha256").hex()[:32]


def test_an_episodes_key_names_the_process_that_owns_it() -> None:
    ring = KeyRing(SECRET)
    assert ring.owned_by(ring.episode_key("1-0-0")) == OwnedEpisode("1-0-0", 0)
    assert ring.owned_by(ring.episode_key("1-0-0", process=3)) == OwnedEpisode("1-0-0", 3)


def test_keys_follow_from_the_secret_and_without_one_they_are_new_each_time() -> None:
    assert all_keys(KeyRing(SECRET)) == all_keys(KeyRing(SECRET))
    rings = [KeyRing(SECRET), KeyRing(SECRET[::-1]), KeyRing(), KeyRing(), KeyRing(b"")]
    assert len({ring.admin for ring in rings}) == 5
    assert len(keys.secrets.token_bytes(keys.SECRET_BYTES)) == 32


def test_a_new_secret_is_its_owners_alone_and_on_disk_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed = tmp_path / "server.key", []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (flushed.append(os.fstat(handle).st_size), fsync(handle)))
    secret = make_secret(path)
    assert flushed == [32] and path.read_bytes() == secret and len(secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_secret(path) == secret and flushed == [32]


@NEEDS_ROOT
def test_a_disk_that_takes_no_secret_has_no_part_of_one_and_takes_it_later(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.refuse("full")
        with pytest.raises(OSError, match="No space left"):
            make_secret(disk.folder / "server.key")
        disk.take()
        assert len(make_secret(disk.folder / "server.key")) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_secret_that_another_may_read_write_or_run_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "server.key"
    make_secret(path)
    path.chmod(mode)
    with pytest.raises(SecretError, match="chmod 600"):
        read_secret(path)


@pytest.mark.parametrize(("length", "is_enough"), [(31, False), (32, True), (33, True)])
def test_a_secret_has_so_many_bytes_at_least(tmp_path: Path, length: int, is_enough: bool) -> None:
    path = tmp_path / "server.key"
    path.write_bytes(bytes(length))
    path.chmod(0o600)
    if is_enough:
        assert read_secret(path) == bytes(length)
    else:
        with pytest.raises(SecretError, match=f"must hold 32 random bytes, got {length}"):
            read_secret(path)


def test_beyond_this_machine_each_run_has_a_secret_that_follows_from_the_operators(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    with pytest.raises(SecretError, match=r"server\.host=10\.0\.0\.1 can be reached by others"):
        secret_of_run(one, host="10.0.0.1")
    operators = make_secret(tmp_path / "server.key")
    found = [secret_of_run(one, host="10.0.0.1"), secret_of_run(two, host="10.0.0.1"), operators]
    assert len(set(found)) == 3 and found[0] == secret_of_run(one, host="10.0.0.1")
    assert not (one / "server.key").exists()
    local = secret_of_run(one, host="127.0.0.1")
    assert local == (one / "server.key").read_bytes() and local not in found


def test_secrets_of_one_purpose_are_digests_of_it_under_the_runs(tmp_path: Path) -> None:
    folder, host = tmp_path / "run", "10.0.0.1"
    folder.mkdir()
    operators = make_secret(tmp_path / "server.key")
    runs = secret_of_run(folder, host=host)
    assert runs == hmac.digest(operators, b"run", "sha256")
    assert process_secret(runs) == hmac.digest(runs, b"server processes", "sha256")
    assert round_secret(folder, host=host) == hmac.digest(runs, b"rows", "sha256")
    assert wire_secret(folder, host=host, label=b"weights") == hmac.digest(runs, b"weights", "sha256")
    local = secret_of_run(folder, host="127.0.0.1")
    assert wire_secret(folder, host="127.0.0.1", label=b"weights") == hmac.digest(local, b"weights", "sha256")
