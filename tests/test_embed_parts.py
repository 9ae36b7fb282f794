"""A folder embedded by two worker processes is the folder embedded by one."""

import forks
import numpy as np
import pandas as pd
import pytest
from PIL import Image

import pumalib
from pumalib import cluster, embed_parts, index
from pumalib.__main__ import main

MINI = embed_parts.Source("mini")


@pytest.fixture(scope="module")
def address():
    forks.ready()
    with cluster.local(2) as address:
        yield address


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Twelve images in two folders, and one that cannot be read; parts are of five."""
    monkeypatch.setattr(embed_parts, "PART", 5)
    rng = np.random.default_rng(0)
    for name in ("cups", "hats"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            noise = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
            picture = Image.fromarray(noise).resize((60, 50), Image.Resampling.BICUBIC)
            picture.save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def model():
    return pumalib.load("mini")


def test_two_workers_give_what_one_process_gives(address, folder, model, tmp_path, capsys):
    alone = index.FolderIndex(model, folder, tmp_path / "alone")
    assert alone.update().new == 12
    capsys.readouterr()
    ask = ["embed", str(folder), "-o", str(tmp_path / "vectors.npz"), "--model", "mini"]
    assert main([*ask, "--store", str(tmp_path / "shared"), "--scheduler", address]) == 0
    said = capsys.readouterr().out
    assert "left out: broken.jpg cannot be read" in said
    assert "12 images in the index (0 unchanged, 12 new, 0 changed, 0 gone, 1 unreadable)" in said
    stored = np.load(tmp_path / "vectors.npz")
    assert stored["paths"].tolist() == alone.table["path"].tolist()
    np.testing.assert_allclose(stored["vectors"], alone.vectors(), atol=1e-6)
    together = index.FolderIndex(model, folder, tmp_path / "shared")
    pd.testing.assert_frame_equal(together.table, alone.table)
    assert not list(together.store.glob("parts*")), "parts are removed"


def test_only_what_is_new_or_changed_goes_to_workers(address, folder, model, tmp_path, monkeypatch):
    found = index.FolderIndex(model, folder, tmp_path / "shared")
    embed_parts.update(found, MINI, address)
    (folder / "hats" / "5.png").unlink()
    Image.new("RGB", (60, 50), "red").save(folder / "cups" / "0.png")
    sent = []
    run_each = cluster.run_each

    def noted(function, items, *rest, **options):
        sent.extend(path for item in items.values() for path in item[-2]["path"])
        run_each(function, items, *rest, **options)

    monkeypatch.setattr(cluster, "run_each", noted)
    counts = embed_parts.update(found, MINI, address)
    assert sorted(sent) == ["broken.jpg", "cups/0.png"]
    assert (counts.unchanged, counts.new, counts.changed, counts.gone) == (10, 0, 1, 1)


def test_finished_parts_are_kept_where_it_was_stopped(
    address, folder, model, tmp_path, monkeypatch
):
    found = index.FolderIndex(model, folder, tmp_path / "shared")

    def stop(self, embed=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(index.FolderIndex, "update", stop)
        embed_parts.update(found, MINI, address)
    parts = list((found.store / "parts").glob("*.npz"))
    assert len(parts) == 3
    # One has changed since and one has come: they alone are not taken from there.
    Image.new("RGB", (60, 50), "red").save(folder / "cups" / "0.png")
    Image.new("RGB", (60, 50), "blue").save(folder / "a.png")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(index.FolderIndex, "update", stop)
        embed_parts.update(found, MINI, address)
    assert len(list((found.store / "parts").glob("*.npz"))) > 3, "parts overlap"
    monkeypatch.setattr(cluster, "run_each", lambda *given, **options: None)
    counts = embed_parts.update(found, MINI, address)
    assert counts.new == 13 and counts.unreadable == 1
    expected = model.embed([folder / path for path in found.table["path"]])
    np.testing.assert_allclose(found.vectors(), expected, atol=1e-5)


def test_another_model_than_the_clients_is_refused(address, folder, tmp_path):
    found = index.FolderIndex(pumalib.load("mini"), folder, tmp_path / "shared")
    with pytest.raises(RuntimeError, match=r"3 of 3 parts failed.* another than the client's"):
        embed_parts.update(found, embed_parts.Source("mini-puma"), address)
