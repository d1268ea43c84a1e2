"""Rules of buffers/weights/: what is pulled is bit for bit what was published, or an error that says what is wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffers.errors import WeightsError
from buffers.weights import patch
from buffers.weights.puller import FolderSource, Puller
from buffers.weights.shard_writer import MEASURED_EVERY, Part, ShardWriter
from buffers.weights.store import MOST_PATCHES, VersionStore
from tests.support.weights.made_versions import MadeRanks, Weights, made_weights, moved

FILE = "model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    (tmp_path / "published").mkdir()
    return VersionStore(tmp_path / "published")


@pytest.fixture
def puller(store: VersionStore, tmp_path: Path) -> Puller:
    return new_puller(store, tmp_path / "pulled")


def new_puller(store: VersionStore, folder: Path) -> Puller:
    folder.mkdir(exist_ok=True)
    return Puller(FolderSource(store.folder), folder, file=FILE)


def read(folder: Path) -> Weights:
    return {name: weight.view(torch.uint16).numpy() for name, weight in load_file(folder / FILE).items()}


def assert_same(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name], weight)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 1.0])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_patch_gives_every_bit_of_the_new_range(share: float, dtype: type[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 2**16, 5000).astype(dtype)
    new = np.where(rng.random(5000) < share, old + 1, old).astype(dtype)
    changed, encoded = patch.encode(old, new)
    assert changed == patch.num_changed(old, new)
    assert len(encoded) <= patch.patch_bytes(changed=changed, count=5000, item_bytes=new.itemsize)
    patch.apply(encoded, changed=changed, target=old)
    np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("where", [[0], [254], [255], [256], [510], [511], [4999], [0, 255, 4999]])
def test_a_patch_names_indices_that_are_far_apart(where: list[int]) -> None:
    old, new = np.zeros(5000, np.uint16), np.zeros(5000, np.uint16)
    new[where] = 7
    changed, encoded = patch.encode(old, new)
    patch.apply(encoded, changed=changed, target=old)
    assert np.flatnonzero(old).tolist() == where


def test_a_patch_compares_bits_and_not_numbers() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0]).bfloat16().view(torch.int16).numpy().view(np.uint16)
    new = torch.tensor([-0.0, float("nan"), 1.0]).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert patch.num_changed(old, new) == 1


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_dense_version_is_what_the_ranks_hold_together(store: VersionStore, puller: Puller, num: int) -> None:
    weights = made_weights()
    manifest = MadeRanks(store, num=num).publish(weights, version=0)
    assert manifest.base is None and len(manifest.shards) == num
    assert_same(read(puller.pull(manifest.name)), weights)


def test_a_single_ranks_file_is_loaded_as_it_is(store: VersionStore, puller: Puller) -> None:
    manifest = MadeRanks(store, num=1).publish(made_weights(), version=0)
    pulled = puller.pull(manifest.name) / FILE
    assert os.path.samefile(pulled, store.folder / manifest.name / "rank-0.bin"), "the memory is taken once"


@pytest.mark.parametrize("num", [1, 2])
def test_patches_follow_one_another_and_a_late_joiner_pulls_the_same(
    store: VersionStore, puller: Puller, tmp_path: Path, num: int
) -> None:
    ranks, weights = MadeRanks(store, num=num), made_weights()
    puller.pull(ranks.publish(weights, version=0).name)
    for version in range(1, 6):
        weights = moved(weights, share=0.02, seed=version)
        manifest = ranks.publish(weights, version=version, as_patch=True)
        assert manifest.base is not None
        assert manifest.num_bytes < 0.2 * manifest.dense_bytes
        folder = puller.pull(manifest.name)
        assert_same(read(folder), weights)
        puller.keep([folder.name])
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    late = new_puller(store, tmp_path / "late").pull((store.folder / "newest").read_text())
    assert_same(read(late), weights)


def test_a_puller_that_starts_again_resumes_with_what_it_has(store: VersionStore, tmp_path: Path) -> None:
    ranks, weights = MadeRanks(store, num=2), made_weights()
    first = ranks.publish(weights, version=0)
    new_puller(store, tmp_path / "pulled").pull(first.name)
    (tmp_path / "pulled" / ".version-000001-dead").mkdir()  # as a puller that was killed leaves it
    weights = moved(weights, share=0.1, seed=1)
    second = ranks.publish(weights, version=1, as_patch=True)
    (store.folder / first.name / "rank-0.bin").unlink()  # it is not asked for again
    assert_same(read(new_puller(store, tmp_path / "pulled").pull(second.name)), weights)
    assert not list((tmp_path / "pulled").glob(".*"))


def test_a_folder_never_changes_once_it_is_there(store: VersionStore, puller: Puller) -> None:
    ranks, weights = MadeRanks(store, num=1), made_weights()
    first = puller.pull(ranks.publish(weights, version=0).name)
    puller.pull(ranks.publish(moved(weights, share=0.1, seed=1), version=1, as_patch=True).name)
    assert_same(read(first), weights)


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("as_patch", [False, True])
def test_a_damaged_shard_is_refused_and_nothing_is_left(
    store: VersionStore, puller: Puller, num: int, as_patch: bool
) -> None:
    ranks, weights = MadeRanks(store, num=num), made_weights()
    puller.pull(ranks.publish(weights, version=0).name)
    manifest = ranks.publish(moved(weights, share=0.1, seed=1), version=1, as_patch=as_patch)
    shard = store.folder / manifest.name / "rank-0.bin"
    content = bytearray(shard.read_bytes())
    content[manifest.shards[0].pieces[0].offset + 3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(WeightsError, match=r"checksum of embedding.* is not in rank-0\.bin; publish it again, densely"):
        puller.pull(manifest.name)
    shard.write_bytes(content[:-1])
    with pytest.raises(WeightsError, match="publish it again"):
        puller.pull(manifest.name)
    assert len(list(puller._folder.iterdir())) == 1


def test_a_late_joiner_is_told_which_patch_of_the_chain_is_damaged(store: VersionStore, tmp_path: Path) -> None:
    ranks, weights, chain = MadeRanks(store, num=2), made_weights(), []
    for version in range(4):
        weights = moved(weights, share=0.1, seed=version)
        chain.append(ranks.publish(weights, version=version, as_patch=version > 0))
    shard = store.folder / chain[2].name / "rank-1.bin"
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    with pytest.raises(WeightsError, match=f"version {chain[2].name}: the checksum of embedding .* is not in rank-1"):
        new_puller(store, tmp_path / "late").pull(chain[3].name)


def test_a_base_that_is_not_what_the_patch_was_made_against_is_refused(store: VersionStore, puller: Puller) -> None:
    ranks, weights = MadeRanks(store, num=1), made_weights()
    first = ranks.publish(weights, version=0)
    folder = puller.pull(first.name)
    copied = (folder / FILE).read_bytes()
    (folder / FILE).unlink()  # the published file is the same memory
    (folder / FILE).write_bytes(copied[:-1] + bytes([copied[-1] ^ 1]))
    patched = ranks.publish(moved(weights, share=0.02, seed=3), version=1, as_patch=True)
    with pytest.raises(WeightsError, match="the checksum of scale, once made, must be as in its manifest"):
        puller.pull(patched.name)


def test_a_missing_base_is_named(store: VersionStore, puller: Puller) -> None:
    ranks, weights = MadeRanks(store, num=1), made_weights()
    first = ranks.publish(weights, version=0)
    second = ranks.publish(moved(weights, share=0.1, seed=1), version=1, as_patch=True)
    for path in (store.folder / first.name).iterdir():
        path.unlink()
    (store.folder / first.name).rmdir()
    with pytest.raises(WeightsError, match=rf"version {first.name} must be in .*, and is not; publish it again"):
        puller.pull(second.name)


@pytest.mark.parametrize(
    ("found", "instead", "words"),
    [
        ('"format":1', '"format":2', "must have format 1, got 2"),
        ('"start":0', '"start":8', "the pieces of embedding must join at element 0, got 8"),
        ('"shape":[7]', '"shape":[8]', "the pieces of norm must cover its 8 elements, got 7"),
        ('"dtype":"BF16"', '"dtype":"Q4"', "dtype of embedding must be one of F64, F32, F16, BF16, got Q4"),
        ('"file":"rank-0.bin"', '"file":"../rank"', "the file of a shard must be a plain name, got ../rank"),
        ('"version":0', '"version":"0"', "must be a manifest, got Expected `int`, got `str`"),
        ('"num_changed":null', '"num_changed":1', "patch"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_refused(
    store: VersionStore, puller: Puller, found: str, instead: str, words: str
) -> None:
    manifest = MadeRanks(store, num=2).publish(made_weights(), version=0)
    path = store.folder / manifest.name / "manifest.json"
    text = path.read_text()
    assert found in text
    path.write_text(text.replace(found, instead))
    with pytest.raises(WeightsError, match=re.escape(words)):
        puller.pull(manifest.name)


def test_no_room_is_one_line_with_the_remedy(
    store: VersionStore, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = MadeRanks(store, num=2).publish(made_weights(), version=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsError, match=r"must have 0\.0 MB of room in .*No space left.*--shm-size\)$") as error:
        puller.pull(manifest.name)
    assert "\n" not in str(error.value)
    assert not list(puller._folder.iterdir())


def test_a_dense_version_comes_at_least_every_twenty_and_replaces_the_chain(store: VersionStore) -> None:
    ranks, weights = MadeRanks(store, num=1), made_weights()
    assert store.base is None
    dense = []
    for version in range(2 * (MOST_PATCHES + 1) + 1):
        as_patch = store.base is not None
        if not as_patch:
            dense.append(version)
        ranks.publish(weights, version=version, as_patch=as_patch)
    assert dense == [0, 20, 40]
    assert len(list(store.folder.glob("version-*"))) == 1


def test_patches_that_are_together_as_large_as_the_weights_are_followed_by_a_dense_version(store: VersionStore) -> None:
    ranks, weights, dense = MadeRanks(store, num=1), made_weights(), []
    for version in range(9):
        weights = moved(weights, share=0.15, seed=version)
        as_patch = store.base is not None
        if not as_patch:
            dense.append(version)
        ranks.publish(weights, version=version, as_patch=as_patch)
        there = sum(path.stat().st_size for path in store.folder.rglob("*.bin"))
        assert there < 2.4 * 816 * 2
    assert dense == [0, 6]


@pytest.mark.parametrize("name", ["../version-000001-0a1b2c3d", "..", "", "newest", "version-000001-0a1b2c3d/x"])
def test_what_is_no_versions_name_is_refused(puller: Puller, name: str) -> None:
    with pytest.raises(WeightsError, match="a version's name must be like version-000007-0a1b2c3d, got"):
        puller.pull(name)


def test_shards_that_do_not_make_whole_tensors_are_not_published(store: VersionStore) -> None:
    ranks = MadeRanks(store, num=2)
    scratch = store.begin(0)
    shards = ranks.write(scratch, made_weights())
    with pytest.raises(WeightsError, match="the pieces of embedding must cover its 808 elements, got 408"):
        store.commit(scratch, version=0, base=None, shards=shards[:1])
    assert not (store.folder / "newest").exists()
    store.begin(1)
    assert not scratch.exists(), "what was not published is removed"


def test_the_copy_is_dropped_for_a_while_when_too_much_changes(store: VersionStore) -> None:
    writer = ShardWriter("rank-0.bin")
    parts: list[Part] = MadeRanks(store, num=1).parts(made_weights(), rank=0)
    assert writer.compare(parts).changed == sum(part.count for part in parts), "there is nothing to compare with"
    kept = []
    for version in range(2 * MEASURED_EVERY):
        pays = version % MEASURED_EVERY != 1  # as found where there is a copy
        writer.write(store.begin(version), parts, name=f"v{version}", as_patch=False, pays=pays)
        kept.append(writer.last is not None)
    assert [number for number, has in enumerate(kept) if has] == [0, 20]
    assert writer.compare(parts).changed > 0
