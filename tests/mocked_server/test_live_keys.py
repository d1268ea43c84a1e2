"""Users' keys: shown once, stored as hashes, revoked at once."""

from __future__ import annotations

import pytest

from mocked_server.live_keys import LiveKeyError, LiveKeys


@pytest.fixture
def keys(tmp_path):
    return LiveKeys(tmp_path / "live")


def test_a_key_opens_for_its_user_and_is_not_in_the_file(keys):
    key = keys.add("ann")
    assert keys.user_of(key) == "ann"
    assert key.rpartition("-")[2] not in keys.path.read_text()
    assert keys.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change", [lambda key: key + "0", lambda key: key[:-1], lambda key: key.replace("ann", "bob"), lambda _: ""]
)
def test_another_key_opens_nothing(keys, change):
    assert keys.user_of(change(keys.add("ann"))) is None


def test_what_another_process_changes_counts_at_once(keys, tmp_path):
    key = keys.add("ann")
    assert keys.user_of(key) == "ann"
    LiveKeys(tmp_path / "live").revoke("ann")
    assert keys.user_of(key) is None
    again = LiveKeys(tmp_path / "live").add("ann")
    assert (keys.user_of(again), keys.user_of(key)) == ("ann", None)


@pytest.mark.parametrize("name", ["", "a b", "a-b", "\N{LATIN SMALL LETTER E WITH ACUTE}", "x" * 41, "../x"])
def test_a_name_that_is_none_is_refused(keys, name):
    with pytest.raises(LiveKeyError, match="the name of a key must be"):
        keys.add(name)


def test_a_key_that_is_not_there_cannot_be_revoked(keys):
    with pytest.raises(LiveKeyError, match="known are none"):
        keys.revoke("ann")


@pytest.mark.parametrize("content", ["", "[]", '{"ann": 1}', '{"ann": {"sha256": 1}}', "{"])
def test_a_file_that_is_none_is_refused_and_users_stay_who_they_were(keys, content):
    key = keys.add("ann")
    assert keys.user_of(key) == "ann"
    keys.path.write_text(content)
    with pytest.raises(LiveKeyError, match="must hold the keys"):
        keys.add("bob")
    assert (keys.user_of(key), keys.user_of("us-live.bob-0123")) == ("ann", None)
