"""A folder's index follows the folder, finds similar images, and survives an interruption."""

import contextlib
import dataclasses
import hashlib
import importlib
import io
import os
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from pumalib import config, index, models, paths
from pumalib import embedder as embedder_module
from pumalib.embedder import Embedder
from pumalib.index import Counts, FolderIndex

RUN = config.Run(
    data=config.Data(image_size=48),
    method=config.METHODS["linear"],
    dim=16,
    pretrained="random",
)
PICTURES = ["a/one.png", "a/two.png", "b/c/three.png", "four.png"]


def embedder_of(seed=0, run=RUN):
    torch.manual_seed(seed)
    model = models.build(run.method, run.backbone, run.dim, pretrained="random")
    return Embedder(model.eval(), run)


@pytest.fixture(scope="module")
def embedder():
    return embedder_of()


def picture(number):
    """A smooth picture (48 x 60) of its own."""
    noise = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((60, 48), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "pictures"
    for number, path in enumerate(PICTURES):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / path)
    return folder


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def embedded(monkeypatch):
    """The names of the files that were decoded to be embedded."""
    decode = embedder_module.decode
    names = []

    def noted(source, upright=False):
        if isinstance(source, Path):
            names.append(source.name)
        return decode(source, upright)

    monkeypatch.setattr(embedder_module, "decode", noted)
    return names


def assert_right(found):
    """Every vector equals that of its file embedded alone."""
    vectors = found.vectors()
    assert vectors.shape == (len(found.table), RUN.dim)
    for path, vector in zip(found.table["path"], vectors):
        alone = found.embedder.embed(found.folder / path)[0]
        np.testing.assert_allclose(vector, alone / np.linalg.norm(alone), atol=1e-5)
    assert found.table.index.is_unique
    assert found.table["path"].is_unique


class TestUpdate:
    def test_a_new_folder_and_again(self, embedder, folder, store, embedded):
        found = FolderIndex(embedder, folder, store)
        assert found.update() == Counts(unchanged=0, new=4, changed=0, gone=0, unreadable=0)
        assert sorted(found.table["path"]) == sorted(PICTURES)
        assert len(embedded) == 4
        before = found.table
        assert found.update() == Counts(unchanged=4, new=0, changed=0, gone=0, unreadable=0)
        assert found.table.equals(before)
        assert len(embedded) == 4, "nothing is embedded twice"
        assert_right(found)

    def test_follows_the_folder(self, embedder, folder, store, embedded, capsys):
        (folder / "broken.jpg").write_bytes(b"no image")
        found = FolderIndex(embedder, folder, store)
        assert found.update() == Counts(unchanged=0, new=4, changed=0, gone=0, unreadable=1)
        before = found.table
        embedded.clear()

        (folder / "four.png").unlink()
        picture(7).save(folder / "a" / "one.png")
        (folder / "d").mkdir()
        picture(8).save(folder / "d" / "five.png")
        capsys.readouterr()
        assert found.update() == Counts(unchanged=2, new=1, changed=1, gone=1, unreadable=1)
        said = "left out: broken.jpg cannot be read as an image (it has none of the formats JPEG, "
        assert capsys.readouterr().out.startswith(said)
        assert sorted(embedded) == ["broken.jpg", "five.png", "one.png"]
        assert_right(found)
        unchanged = before[before["path"].isin(["a/two.png", "b/c/three.png"])]
        assert found.table.loc[unchanged.index].equals(unchanged)
        assert not set(found.table.index[2:]) & set(before.index), "no number is given twice"

    def test_a_changed_image_that_is_broken_now(self, embedder, folder, store):
        found = FolderIndex(embedder, folder, store)
        found.update()
        (folder / "four.png").write_bytes(b"no image")
        assert found.update() == Counts(unchanged=3, new=0, changed=0, gone=0, unreadable=1)
        picture(3).save(folder / "four.png")
        assert found.update() == Counts(unchanged=3, new=1, changed=0, gone=0, unreadable=0)

    def test_a_change_of_the_same_size_is_seen_by_its_time(self, embedder, folder, store):
        found = FolderIndex(embedder, folder, store)
        found.update()
        os.utime(folder / "four.png", ns=(0, 10**18))
        assert found.update().changed == 1

    def test_hidden_files_are_left_out(self, embedder, folder, store):
        for path in (".hidden.png", ".cache/x.png", "a/.thumbnails/y.png", "a/._one.png"):
            (folder / path).parent.mkdir(exist_ok=True)
            picture(9).save(folder / path)
        (folder / "a" / "notes.txt").write_text("no image")
        assert list(index.list_images(folder)["path"]) == sorted(PICTURES)
        assert FolderIndex(embedder, folder, store).update().new == 4

    def test_a_folder_below_a_hidden_one(self, folder, tmp_path):
        hidden = tmp_path / ".hidden" / "pictures"
        shutil.copytree(folder, hidden)
        assert len(index.list_images(hidden)) == 4

    def test_photographs_are_turned(self, embedder, tmp_path, store):
        exif = Image.Exif()
        exif[0x0112] = 3  # upside down
        (tmp_path / "photos").mkdir()
        picture(1).save(tmp_path / "photos" / "turned.png", exif=exif)
        picture(1).rotate(180).save(tmp_path / "photos" / "upright.png")
        found = FolderIndex(embedder, tmp_path / "photos", store)
        found.update()
        assert found.near_duplicates(0.999)["cosine"].tolist() == pytest.approx([1])
        assert found.search("turned.png")["cosine"].tolist() == pytest.approx([1])


class TestRefused:
    def test_an_empty_folder(self, embedder, folder, store):
        """... is a disk that is not there, rather than images that have all gone."""
        found = FolderIndex(embedder, folder, store)
        found.update()
        shutil.rmtree(folder)
        with pytest.raises(FileNotFoundError, match=f"no folder {folder}"):
            found.update()
        folder.mkdir()
        with pytest.raises(ValueError, match=rf"{folder} holds no image at any depth \(\.jpg, "):
            found.update()
        assert len(FolderIndex(embedder, folder, store).table) == 4

    def test_a_folder_without_a_readable_image(self, embedder, folder, store, capsys):
        for path in PICTURES:
            (folder / path).write_bytes(b"no image")
        found = FolderIndex(embedder, folder, store)
        with pytest.raises(ValueError, match=f"none of the images in {folder} can be read"):
            found.update()
        assert len(capsys.readouterr().out.splitlines()) == 4

    def test_a_search_before_the_first_update(self, embedder, folder, store):
        found = FolderIndex(embedder, folder, store)
        assert found.vectors().shape == (0, 16)
        for ask in (lambda: found.search("four.png"), found.near_duplicates):
            with pytest.raises(ValueError, match=r"holds no image yet: call update\(\) first"):
                ask()

    def test_a_query_that_is_no_image(self, embedder, folder, store):
        (folder / "broken.jpg").write_bytes(b"no image")
        found = FolderIndex(embedder, folder, store)
        found.update()
        reasons = {
            "broken.jpg": "it has none of the formats JPEG",
            "x.png": "there is no such file",
        }
        for file, why in reasons.items():
            message = rf"{file} cannot be read as an image \({why}"
            with pytest.raises(ValueError, match=message):
                found.search(file)


def stopped_after(found, count):
    """An `embed` that is interrupted after `count` images, which it gives one by one."""

    def embed(files):
        for number in range(len(files)):
            if number == count:
                raise KeyboardInterrupt
            yield from found.embed_files(files.iloc[[number]])

    return embed


class TestStopped:
    """An update that did not come to its end."""

    def test_what_was_embedded_is_kept(self, embedder, folder, store, embedded):
        """Far below half a minute, and below a batch."""
        found = FolderIndex(embedder, folder, store)
        with pytest.raises(KeyboardInterrupt):
            found.update(stopped_after(found, 3))
        assert len(FolderIndex(embedder, folder, store).table) == 3
        embedded.clear()
        assert found.update() == Counts(unchanged=3, new=1, changed=0, gone=0, unreadable=0)
        assert len(embedded) == 1
        assert_right(found)

    def test_it_is_written_by_time_against_a_kill(self, embedder, folder, store, monkeypatch):
        monkeypatch.setattr(index, "SECONDS", 0)
        monkeypatch.setattr(index, "WRITING_SHARE", 0)
        found = FolderIndex(embedder, folder, store)
        seen = []

        def embed(files):
            for number in range(len(files)):
                seen.append(len(FolderIndex(embedder, folder, store).table))
                yield from found.embed_files(files.iloc[[number]])

        found.update(embed)
        assert seen == [0, 1, 2, 3]

    @pytest.mark.parametrize("is_first", [True, False])
    def test_while_it_is_written(self, embedder, folder, store, monkeypatch, is_first):
        """The file before stays, and the same update is made again."""
        if not is_first:
            FolderIndex(embedder, folder, store).update()
            (folder / "four.png").unlink()
            picture(7).save(folder / "a" / "one.png")
            picture(8).save(folder / "five.png")
        found = FolderIndex(embedder, folder, store)
        written_whole = paths.written_whole

        def stop(path):
            if path.name == index.INDEX_FILE:
                raise KeyboardInterrupt
            return written_whole(path)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(paths, "written_whole", stop)
            found.update()
        again = FolderIndex(embedder, folder, store)
        assert len(again.table) == (0 if is_first else 4)
        again.update()
        assert set(again.table["path"]) == {
            path.name and str(path.relative_to(folder)) for path in folder.rglob("*.png")
        }
        assert_right(again)


class TestNeverAnothersVector:
    @pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
    @pytest.mark.parametrize("by", ["the same", "flat"])
    def test_the_number_of_the_last_image_is_not_given_again(
        self, embedder, folder, store, kind, by
    ):
        """An index of another kind may be updated by a flat one in between."""
        found = FolderIndex(embedder, folder, store, kind=kind)
        found.update()
        last = found.table.index.max()
        gone = found.table["path"][last]
        (folder / gone).unlink()
        between = FolderIndex(embedder, folder, store, kind=kind if by == "the same" else by)
        between.update()
        picture(20).save(folder / "new.png")
        again = FolderIndex(embedder, folder, store, kind=kind)
        again.update()
        assert again.table.index.max() == last + 1
        answer = FolderIndex(embedder, folder, store, kind=kind).search(picture(20), 1)
        assert answer["path"].tolist() == ["new.png"]
        assert answer["cosine"].tolist() == pytest.approx([1])
        assert_right(again)

    def test_an_approximate_index_of_other_vectors_is_not_searched(self, embedder, folder, store):
        """Though it has the same numbers."""
        found = FolderIndex(embedder, folder, store, kind="ivf")
        found.update()
        other = FolderIndex(embedder, folder, store.parent / "other", kind="ivf")
        for path in PICTURES:
            picture(50 + len(path)).save(folder / path)
        other.update()
        shutil.copy(found.store / "ivf.npz", other.store / "ivf.npz")
        mixed = FolderIndex(embedder, folder, store.parent / "other", kind="ivf")
        assert mixed.table.index.equals(found.table.index)
        assert mixed._searched is mixed._vectors
        mixed.update()
        assert mixed._searched is not mixed._vectors

    @pytest.mark.parametrize("file", [index.INDEX_FILE, "ivf.npz"])
    @pytest.mark.parametrize("damage", ["cut", "emptied", "flipped", "another"])
    def test_a_damaged_file_is_made_anew(self, embedder, folder, store, file, damage):
        found = FolderIndex(embedder, folder, store, kind="ivf")
        found.update()
        whole = (found.store / file).read_bytes()
        middle = len(whole) // 2
        contents = {
            "cut": whole[:middle],
            "emptied": b"",
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "another": b"no archive",
        }
        (found.store / file).write_bytes(contents[damage])
        with pytest.warns(UserWarning, match=rf"{file} is damaged .* made anew"):
            again = FolderIndex(embedder, folder, store, kind="ivf")
        with warnings.catch_warnings(action="ignore"):
            again.update()
        assert_right(FolderIndex(embedder, folder, store, kind="ivf"))

    def test_an_index_of_earlier_versions_is_made_anew(self, embedder, folder, store):
        found = FolderIndex(embedder, folder, store)
        found.store.mkdir(parents=True)
        for name in index.OLD_FILES:
            (found.store / name).write_bytes(b"as it was")
        assert found.update().new == 4
        assert {file.name for file in found.store.iterdir()} <= {index.INDEX_FILE, index.LOCK_FILE}

    @settings(max_examples=25, deadline=None)
    @given(
        kind=st.sampled_from(["flat", "ivf", "hnsw"]),
        steps=st.lists(
            st.one_of(
                st.tuples(st.just("write"), st.integers(0, 5), st.integers(0, 9)),
                st.tuples(st.just("remove"), st.integers(0, 5)),
                st.tuples(st.just("update"), st.integers(0, 7)),
                st.tuples(st.just("reopen")),
            ),
            max_size=20,
        ),
    )
    def test_any_history_ends_as_an_index_built_anew(self, embedder, kind, steps):
        """Files are written, changed and removed; updates are interrupted after some images."""
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
            folder = Path(place) / "pictures"
            store = Path(place) / "store"
            folder.mkdir()
            (folder / "always.png").write_bytes(b"99")
            found = FolderIndex(embedder, folder, store, kind=kind)
            owners = {}
            for time, step in enumerate(steps):
                match step:
                    case ("write", name, content):
                        (folder / f"{name}.png").write_bytes(b"%02d" % content)
                        os.utime(folder / f"{name}.png", ns=(time, time))
                    case ("remove", name):
                        (folder / f"{name}.png").unlink(missing_ok=True)
                    case ("update", count):
                        with contextlib.suppress(KeyboardInterrupt):
                            found.update(fake(folder, count))
                    case ("reopen",):
                        found = FolderIndex(embedder, folder, store, kind=kind)
                for number, row in found.table.iterrows():
                    assert owners.setdefault(number, tuple(row)) == tuple(row)
            found.update(fake(folder))
            for one in (found, FolderIndex(embedder, folder, store, kind=kind)):
                assert sorted(one.table["path"]) == sorted(file.name for file in folder.iterdir())
                for path, vector in zip(one.table["path"], one.vectors()):
                    expected = fake_vector((folder / path).read_bytes())
                    np.testing.assert_array_equal(vector, expected)
                numbers = faiss.vector_to_array(one._searched.id_map)
                assert sorted(numbers) == sorted(one.table.index)

    def test_two_updates_of_a_changing_folder(self, embedder, folder, store, capsys):
        """One writes at a time; what both leave is right."""
        ends = threading.Event()
        failures = []

        def keep_updating():
            while not ends.is_set():
                try:
                    FolderIndex(embedder, folder, store).update(fake(folder, seconds=0.002))
                # What a thread raises is lost unless it is told.
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=keep_updating) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(30):
            file = folder / f"{number % 7}.png"
            file.unlink(missing_ok=True)
            file.with_suffix(".new").write_bytes(b"%02d" % number)
            file.with_suffix(".new").rename(file)
            time.sleep(0.01)
        ends.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert "waiting for another process that updates this index" in capsys.readouterr().out
        found = FolderIndex(embedder, folder, store)
        found.update(fake(folder))
        for path, vector in zip(found.table["path"], found.vectors()):
            np.testing.assert_array_equal(vector, fake_vector((folder / path).read_bytes()))


def fake_vector(content):
    """A vector of length 1 of a file's content."""
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8])
    vector = np.random.default_rng(seed).normal(size=RUN.dim).astype(np.float32)
    return vector / np.linalg.norm(vector)


def fake(folder, count=None, seconds=0):
    """An `embed` by `fake_vector`, which is interrupted after `count` files."""

    def embed(files):
        for number, path in enumerate(files["path"]):
            if number == count:
                raise KeyboardInterrupt
            time.sleep(seconds)
            try:
                content = (folder / path).read_bytes()
            except FileNotFoundError:
                none = np.zeros((0, RUN.dim), np.float32)
                yield index.EmbeddedFiles(none, [], {path: "gone"})
                continue
            yield index.EmbeddedFiles(fake_vector(content)[None], [path], {})

    return embed


class TestStore:
    def test_two_models_are_never_in_one_index(self, embedder, folder, store):
        one = FolderIndex(embedder, folder, store)
        one.update()
        other = FolderIndex(embedder_of(seed=1), folder, store)
        assert other.table.empty
        assert other.update().new == 4
        assert one.update().unchanged == 4
        assert_right(one)
        assert_right(other)

    @pytest.mark.parametrize(
        "changes",
        [{"resize": "shorter"}, {"image_size": 64}],
        ids=lambda changes: next(iter(changes)),
    )
    def test_nor_are_two_transforms_of_one_model(self, embedder, folder, store, changes):
        data = dataclasses.replace(RUN.data, **changes)
        other = Embedder(embedder.model, dataclasses.replace(RUN, data=data))
        places = [FolderIndex(each, folder, store).store for each in (embedder, other)]
        assert places[0] != places[1]

    def test_nor_two_crops_of_timm(self, embedder, folder, store):
        """Another version of timm may have another crop for a model."""
        data = dataclasses.replace(RUN.data, resize="timm")
        one, other = (Embedder(embedder.model, dataclasses.replace(RUN, data=data)) for _ in "ab")
        other.view = dataclasses.replace(other.view, crop_share=0.5)
        places = [FolderIndex(each, folder, store).store for each in (one, other)]
        assert places[0] != places[1]

    def test_nor_two_settings_of_the_same_weights(self, embedder, folder, store):
        method = config.method("linear", adapter_scale=0.5)
        other = Embedder(embedder.model, dataclasses.replace(RUN, method=method))
        places = [FolderIndex(each, folder, store).store for each in (embedder, other)]
        assert places[0] != places[1]

    def test_where_the_training_images_lay_is_no_matter(self, embedder, folder, store):
        data = dataclasses.replace(RUN.data, root="/elsewhere")
        other = Embedder(embedder.model, dataclasses.replace(RUN, data=data))
        places = [FolderIndex(each, folder, store).store for each in (embedder, other)]
        assert places[0] == places[1]

    def test_a_folder_that_moved_keeps_its_index(self, embedder, folder, store, embedded):
        FolderIndex(embedder, folder, store).update()
        embedded.clear()
        moved = folder.rename(folder.parent / "moved")
        store = store.rename(store.parent / "moved store")
        found = FolderIndex(embedder, moved, store)
        assert found.update() == Counts(unchanged=4, new=0, changed=0, gone=0, unreadable=0)
        assert not embedded
        assert os.fsencode(folder) not in (found.store / index.INDEX_FILE).read_bytes()
        assert_right(found)

    def test_images_that_exchange_their_names_exchange_their_vectors(self, embedder, tmp_path):
        folder = tmp_path / "out of one archive"
        folder.mkdir()
        files = [folder / "red.bmp", folder / "blue.bmp"]
        for file in files:
            # Of one size in bytes, and of one time.
            Image.new("RGB", (8, 8), file.stem).save(file)
            os.utime(file, ns=(0, 0))
        found = FolderIndex(embedder, folder, tmp_path / "store")
        found.update()

        before = folder / "before.bmp"
        files[0].rename(before)
        files[1].rename(files[0])
        before.rename(files[1])
        assert found.update().changed == 2
        assert_right(found)

    def test_it_is_at_hand_without_an_update(self, embedder, folder, store):
        FolderIndex(embedder, folder, store).update()
        shutil.rmtree(folder / "a")
        found = FolderIndex(embedder, folder, store)
        assert set(found.search("four.png")["path"]) == set(PICTURES) - {"four.png"}

    def test_the_folder_is_only_read(self, embedder, folder, store):
        before = sorted(folder.rglob("*"))
        found = FolderIndex(embedder, folder, store)
        found.update()
        assert sorted(folder.rglob("*")) == before
        assert {file.name for file in found.store.iterdir()} <= {index.INDEX_FILE, index.LOCK_FILE}


class TestSearch:
    @pytest.fixture
    def found(self, embedder, folder, store):
        found = FolderIndex(embedder, folder, store)
        found.update()
        return found

    def test_is_exact(self, found):
        vectors = found.vectors()
        cosines = dict(zip(found.table["path"], vectors @ vectors[0]))
        query = found.table["path"].iloc[0]
        answer = found.search(query, 3)
        del cosines[query]
        assert list(answer.columns) == ["path", "cosine"]
        assert list(answer["path"]) == sorted(cosines, key=cosines.get, reverse=True)
        assert answer["cosine"].tolist() == pytest.approx(sorted(cosines.values(), reverse=True))

    def test_vectors_are_an_array_also_where_faiss_gives_tensors(self, found, monkeypatch):
        """As it does for all once faiss.contrib.torch_utils was imported."""
        inner = found._vectors.index
        stored = torch.from_numpy(np.asarray(inner.reconstruct_n(0, 4)))
        monkeypatch.setattr(type(inner), "reconstruct_n", lambda self, start, count: stored)
        assert isinstance(found.vectors(), np.ndarray)
        assert found.near_duplicates(-1)["cosine"].between(-1.001, 1.001).all()

    def test_an_image_is_left_out_of_its_own_answer(self, found, folder):
        for query in ("four.png", folder / "four.png", str(folder / "four.png")):
            assert "four.png" not in list(found.search(query, 10)["path"])
            assert len(found.search(query, 10)) == 3
            assert len(found.search(query, 2)) == 2

    def test_a_file_of_elsewhere(self, found, folder, tmp_path):
        shutil.copy(folder / "four.png", tmp_path / "four.png")
        answer = found.search(tmp_path / "four.png", 4)
        assert answer["path"][0] == "four.png"
        assert answer["cosine"][0] == pytest.approx(1)
        assert len(answer) == 4

    def test_a_picture_and_an_array(self, found):
        for image in (picture(3), np.asarray(picture(3)), picture(3).convert("RGBA")):
            answer = found.search(image, 1)
            assert answer["path"].tolist() == ["four.png"]
            assert answer["cosine"].tolist() == pytest.approx([1])

    def test_near_duplicates(self, found, folder, monkeypatch):
        assert found.near_duplicates(0.9999).empty
        shutil.copy(folder / "four.png", folder / "copy.png")
        picture(0).save(folder / "first.jpg", quality=95)
        found.update()
        pairs = found.near_duplicates(0.99)
        wanted = {
            frozenset(pair) for pair in (("four.png", "copy.png"), ("a/one.png", "first.jpg"))
        }
        assert {frozenset(pair) for pair in pairs[["one", "other"]].to_numpy()} >= wanted
        assert pairs["cosine"].is_monotonic_decreasing
        assert (pairs["cosine"] > 0.99).all()

        everything = found.near_duplicates(-1)
        vectors = found.vectors()
        place = {path: number for number, path in enumerate(found.table["path"])}
        assert len(everything) == 6 * 5 / 2
        for pair in everything.itertuples():
            expected = vectors[place[pair.one]] @ vectors[place[pair.other]]
            assert pair.cosine == pytest.approx(expected, abs=1e-6)

        monkeypatch.setattr(index, "BLOCK", 4)
        in_blocks = found.near_duplicates(-1)
        assert in_blocks[["one", "other"]].equals(everything[["one", "other"]])

    def test_mirrored_is_another_picture(self, found):
        assert found.search(ImageOps.mirror(picture(3)), 1)["cosine"][0] < 1

    def test_vectors_are_arrays_where_faiss_has_learned_of_tensors(self, found):
        # As importing pytorch-metric-learning's metrics does.
        importlib.import_module("faiss.contrib.torch_utils")
        assert isinstance(found.vectors(), np.ndarray)
        assert found.near_duplicates(0.9999).empty


def filled(embedder, tmp_path, vectors):
    """An index of vectors in the plane, by path; no file of them is there."""
    found = FolderIndex(embedder, tmp_path, tmp_path / "store")
    found._vectors = faiss.IndexIDMap2(faiss.IndexFlatIP(2))
    given = np.array(list(vectors.values()), np.float32)
    numbers = pd.RangeIndex(10, 10 + len(given), name="id")
    found._vectors.add_with_ids(given, numbers.to_numpy())
    found.table = pd.DataFrame({"path": list(vectors)}, index=numbers)
    return found


def at(degrees):
    return np.cos(np.radians(degrees)), np.sin(np.radians(degrees))


class TestGroups:
    """By angles in the plane, whose cosines are known."""

    def test_of_near_duplicates(self, embedder, tmp_path):
        angles = {"b": 10, "a": 0, "c": 12, "far": 90, "x": 180, "y": 195, "w": 270}
        found = filled(embedder, tmp_path, {name: at(angle) for name, angle in angles.items()})
        groups = found.duplicate_groups(np.cos(np.radians(11)))
        # 0, 10 and 12 degrees are one group though 12 are more than 11; x and y are 15 apart.
        assert groups["path"].tolist() == ["a", "b", "c"]
        assert groups["group"].tolist() == [1, 1, 1]
        nearest = np.cos(np.radians([10, 2, 2]))
        assert groups["cosine"].tolist() == pytest.approx(nearest, abs=1e-6)

        groups = found.duplicate_groups(np.cos(np.radians(16)))
        assert groups["path"].tolist() == ["a", "b", "c", "x", "y"]
        assert groups["group"].tolist() == [1, 1, 1, 2, 2]
        none = found.duplicate_groups(0.99999)
        assert list(none.columns) == ["group", "path", "cosine"]
        assert none.empty

    def test_wrong_labels_by_the_vote_of_neighbours(self, embedder, tmp_path):
        angles = {f"cups/{n}": n for n in range(4)} | {f"hats/{n}": 90 + n for n in range(4)}
        angles |= {"cups/wrong": 95, "hats/wrong": 5, "tiny/alone": 2.5, "loose": 91.5}
        found = filled(embedder, tmp_path, {name: at(angle) for name, angle in angles.items()})
        with pytest.warns(UserWarning, match="^2 images are not judged: .* at most 1 others; a lo"):
            wrong = found.likely_wrong_labels(k=3)
        # cups/wrong (95 degrees) is nearest to hats at 93, 92 and 91: "loose" has no vote.
        # hats/wrong (5 degrees) is nearest to cups at 3 and 2, and tiny/alone at 2.5.
        expected = [("cups/wrong", "cups", "hats", 3, 3), ("hats/wrong", "hats", "cups", 2, 3)]
        assert list(wrong.itertuples(index=False, name=None)) == expected
        with pytest.warns(UserWarning, match="^12 images are not judged"):
            wrong = found.likely_wrong_labels(k=100)
        assert wrong.empty, "more than half of all lie in no one folder"
        with pytest.raises(ValueError, match="k = 0; it must be"):
            found.likely_wrong_labels(0)

    def test_copies_of_an_image_do_not_hide_it_from_itself(self, embedder, tmp_path):
        same = {f"cups/{n}": at(0) for n in range(9)} | {f"hats/{n}": at(90) for n in range(3)}
        found = filled(embedder, tmp_path, same | {"hats/wrong": at(0)})
        assert found.likely_wrong_labels(k=3)["path"].tolist() == ["hats/wrong"]

    def test_without_folders_nobody_votes(self, embedder, tmp_path):
        found = filled(embedder, tmp_path, {"a": at(0), "b": at(1)})
        wrong = found.likely_wrong_labels()
        assert list(wrong.columns) == ["path", "label", "suggested", "votes", "of"]
        assert wrong.empty


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
class TestApproximate:
    """A faster index beside the exact one, which follows it."""

    @pytest.fixture(autouse=True)
    def breadth(self, monkeypatch):
        # As many lists as there may be: then nothing is missed, and answers are known.
        monkeypatch.setattr(index, "PROBES", 1000)

    def test_it_finds_what_the_exact_one_finds(self, embedder, folder, store, kind):
        for number in range(30):
            picture(10 + number).save(folder / f"more{number}.png")
        exact = FolderIndex(embedder, folder, store)
        exact.update()
        found = FolderIndex(embedder, folder, store, kind=kind)
        assert found.update().unchanged == 34
        assert (found.store / f"{kind}.npz").is_file()
        again = FolderIndex(embedder, folder, store, kind=kind)
        assert again._searched is not again._vectors
        for query in ("four.png", "more3.png"):
            expected = exact.search(query, 5)
            for one in (found, again):
                answer = one.search(query, 5)
                assert answer["path"].tolist() == expected["path"].tolist()
                assert answer["cosine"].tolist() == pytest.approx(expected["cosine"].tolist())
        assert again.near_duplicates(-1).equals(exact.near_duplicates(-1))

    def test_it_follows_the_folder(self, embedder, folder, store, kind):
        found = FolderIndex(embedder, folder, store, kind=kind)
        found.update()
        (folder / "four.png").unlink()
        picture(7).save(folder / "new.png")
        # By an index of the other kind: this one's file is out of date.
        FolderIndex(embedder, folder, store).update()
        stale = FolderIndex(embedder, folder, store, kind=kind)
        assert stale._searched is stale._vectors, "an outdated one is not searched"
        assert "new.png" in list(stale.search(picture(7), 9)["path"])
        found.update()
        assert found._searched is not found._vectors
        answer = list(found.search(picture(7), 9)["path"])
        assert answer[0] == "new.png"
        assert "four.png" not in answer


def test_an_unknown_kind_is_refused(embedder, folder, store):
    with pytest.raises(ValueError, match="unknown kind of index 'tree'; known: flat, ivf, hnsw"):
        FolderIndex(embedder, folder, store, kind="tree")


def test_vectors_are_written_by_path(embedder, folder, store, tmp_path):
    found = FolderIndex(embedder, folder, store, workers=2)
    found.update()
    picture(8).save(folder / "a" / "between.png")
    found.update()
    found.write_vectors(tmp_path / "out" / "vectors.npz")
    stored = np.load(tmp_path / "out" / "vectors.npz")
    assert stored["paths"].tolist() == sorted([*PICTURES, "a/between.png"])
    for path, vector in zip(stored["paths"], stored["vectors"]):
        alone = found.embedder.embed(folder / path)[0]
        np.testing.assert_allclose(vector, alone / np.linalg.norm(alone), atol=1e-5)
