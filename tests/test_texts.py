"""Language guidance: similarities of classes from names, tables and a text model, and a run that uses them."""

import numpy as np
import pytest

from pumalib import config, data, losses, training
from pumalib.losses.texts import similarities
from pumalib.training import run_folder

NAMES = ["red bird", "red car", "car"]


def test_words_tables_and_a_text_model(tmp_path):
    words = similarities("words", NAMES)
    assert words[0, 2] == 0 < words[0, 1] < words[1, 2] < 1 and np.allclose(np.diag(words), 1)
    file = tmp_path / "texts.csv"
    file.write_text("class_name,text\ncar,car\nred car,red car\nred bird,red bird\nother,x\n")
    np.testing.assert_allclose(similarities(str(file), NAMES), words)
    file.write_text("class_name,x,y\ncar,0,2\nred car,3,3\nred bird,1,0\n")
    half = 0.5**0.5
    np.testing.assert_allclose(similarities(str(file), NAMES), [[1, half, 0], [half, 1, half], [0, half, 1]])
    np.savez(tmp_path / "texts.npz", names=NAMES[::-1], vectors=[[0, 2], [3, 3], [1, 0]])
    np.testing.assert_allclose(similarities(str(tmp_path / "texts.npz"), NAMES), similarities(str(file), NAMES))
    models = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer

    bag, folder = models.BoW(vocab=["red", "bird", "car"]), str(tmp_path / "model")
    SentenceTransformer(modules=[bag], device="cpu").save(folder)
    np.testing.assert_allclose(similarities(folder, NAMES), [[1, 0.5, 0], [0.5, 1, half], [0, half, 1]], atol=1e-6)


def test_texts_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr("pumalib.paths.ROOT", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "few.csv").write_text("class_name,text\ncar,a car\n")
    (tmp_path / "bad.npz").write_bytes(b"damaged")
    for source, message in (
        ("none.csv", "texts = 'none.csv': there is no file .*none.csv"),
        ("bad.npz", "bad.npz is no table of texts or embeddings by class_name"),
        ("few.csv", "few.csv has nothing on 2 of the classes, for instance 'red bird'"),
        ("no such model", "texts = 'no such model' cannot be used .*known: \"words\", a .csv"),
    ):
        with pytest.raises(ValueError, match=message):
            similarities(source, NAMES)


def test_a_run_guided_by_a_file_is_another_when_the_file_is(tmp_path, monkeypatch):
    file, made, make = tmp_path / "texts.csv", [], losses.make
    profile = config.profile("smoke", datasets=["flowers"], epochs=1, batch_size=90)
    run = profile.run("linear", loss="language", loss_settings={"loss": "triplet", "texts": str(file)})
    classes = data.load(run.data).train[["class_name"]].drop_duplicates()
    classes.assign(text="the same").to_csv(file, index=False)
    before = run_folder.run_name(run)
    classes.assign(text=classes["class_name"]).to_csv(file, index=False)
    assert run_folder.run_name(run) != before
    monkeypatch.setattr(losses, "make", lambda *args, **kw: made.append(make(*args, **kw)) or made[-1])
    training.train(run, tmp_path / "run")
    assert made[-1].similarity.shape == (24, 24) and 0 < made[-1].similarity.mean() < 1
