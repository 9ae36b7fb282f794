"""Language guidance: similarities of classes from names, tables and a text model; a run with it."""

import importlib
import sys

import numpy as np
import pytest

from pumalib import config, data, losses, training
from pumalib.losses.texts import readable, similarities
from pumalib.training import run_folder

NAMES = ["red bird", "red car", "car"]
HALF = 0.5**0.5


def test_a_text_models_folder_is_told_from_another_of_its_name(tmp_path):
    folder = tmp_path / "model" / "1_Pooling"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    model = str(folder.parent)
    before = losses.texts.digest(model)
    assert losses.texts.digest(model) == before != ""
    (folder / "config.json").write_text("[]")
    assert losses.texts.digest(model) != before
    for named in ("words", "characters", "some/name-of-the-hub", ""):
        assert losses.texts.digest(named) == ""


def test_similarities_of_words():
    words = similarities("words", NAMES)
    assert words[0, 2] == 0 < words[0, 1] < words[1, 2] < 1
    np.testing.assert_allclose(np.diag(words), 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("001_Black_footed_Albatross", "Black footed Albatross"),
        ("001.Black_footed_Albatross", "Black footed Albatross"),
        ("n01629819_European_fire_salamander", "European fire salamander"),
        ("013_Audi_TT_RS_Coupe_2012", "Audi TT RS Coupe 2012"),
        ("Alpro-Fresh-Soy-Milk", "Alpro Fresh Soy Milk"),
        ("short zag flat thin wide", "short zag flat thin wide"),
        # A name that is a number keeps it, also where more follow.
        ("0023-20e3", "0023 20e3"),
        ("17", "17"),
        ("2012_2013", "2012 2013"),
    ],
)
def test_words_in_the_names_of_folders(name, words):
    assert readable(name) == words


def test_names_of_one_benchmark_are_compared_by_their_words():
    names = ["001_Black_footed_Albatross", "002_Laysan_Albatross", "009_Brewer_Blackbird"]
    words = similarities("words", names)
    np.testing.assert_allclose(words, similarities("words", [readable(name) for name in names]))
    assert words[0, 2] == words[1, 2] == 0 < words[0, 1]


def test_similarities_of_characters():
    names = ["sparrow", "sparrows", "gull"]
    characters = similarities("characters", names)
    assert similarities("words", names)[0, 1] == 0
    assert characters[0, 1] > 0.6
    assert characters[0, 2] == characters[1, 2] == 0
    np.testing.assert_allclose(np.diag(characters), 1)


def test_similarities_of_tables(tmp_path):
    texts = tmp_path / "texts.csv"
    texts.write_text("class_name,text\ncar,car\nred car,red car\nred bird,red bird\nother,x\n")
    np.testing.assert_allclose(similarities(str(texts), NAMES), similarities("words", NAMES))

    expected = [[1, HALF, 0], [HALF, 1, HALF], [0, HALF, 1]]
    numbers = tmp_path / "numbers.csv"
    numbers.write_text("class_name,x,y\ncar,0,2\nred car,3,3\nred bird,1,0\n")
    np.testing.assert_allclose(similarities(str(numbers), NAMES), expected)

    arrays = tmp_path / "arrays.npz"
    np.savez(arrays, names=NAMES[::-1], vectors=[[0, 2], [3, 3], [1, 0]])
    np.testing.assert_allclose(similarities(str(arrays), NAMES), expected)


def test_names_of_classes_are_texts(tmp_path):
    """Spreadsheets take 001 for a number, pandas NA for nothing."""
    (tmp_path / "texts.csv").write_text("class_name,text\n001,red bird\nNA,red car\n")
    (tmp_path / "numbers.csv").write_text("class_name,a,b\n001,1,0\nNA,0,1\n")
    assert similarities(str(tmp_path / "texts.csv"), ["001", "NA"])[0, 1] > 0
    assert similarities(str(tmp_path / "numbers.csv"), ["001", "NA"]).tolist() == [[1, 0], [0, 1]]


def test_similarities_of_a_text_model(tmp_path):
    models = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer

    bag = models.BoW(vocab=["red", "bird", "car"])
    folder = str(tmp_path / "model")
    SentenceTransformer(modules=[bag], device="cpu").save(folder)
    expected = [[1, 0.5, 0], [0.5, 1, HALF], [0, HALF, 1]]
    np.testing.assert_allclose(similarities(folder, NAMES), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.csv", r"texts = 'none.csv': there is no file .*none.csv"),
        ("bad.npz", "bad.npz is no table of texts or embeddings by class_name"),
        ("few.csv", "few.csv has nothing on 2 of the classes, for instance 'red bird'"),
        ("twice.csv", "twice.csv is no table .*class 'car' stands twice"),
        ("empty.csv", "empty.csv is no table .*class 'car' has no text"),
        ("wordless.csv", "texts = 'wordless.csv': class 'car' has no word in its text"),
        ("zero.csv", "texts = 'zero.csv': class 'red car' has .* a vector that is zero"),
        ("infinite.csv", "texts = 'infinite.csv': class 'red bird' has .* not finite"),
        (
            "no such model",
            r"texts = 'no such model' cannot be used .*known: \"words\", \"characters\", a .csv",
        ),
    ],
)
def test_texts_that_cannot_be_used(source, message, tmp_path, monkeypatch):
    monkeypatch.setattr("pumalib.paths.ROOT", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "few.csv").write_text("class_name,text\ncar,a car\n")
    (tmp_path / "twice.csv").write_text("class_name,text\ncar,a car\ncar,cars\n")
    (tmp_path / "empty.csv").write_text("class_name,text\ncar,\n")
    (tmp_path / "wordless.csv").write_text(
        "class_name,text\ncar,★\nred car,red car\nred bird,red bird\n"
    )
    (tmp_path / "zero.csv").write_text("class_name,x,y\ncar,0,2\nred car,0,0\nred bird,1,0\n")
    (tmp_path / "infinite.csv").write_text("class_name,x,y\ncar,0,2\nred car,1,0\nred bird,inf,0\n")
    (tmp_path / "bad.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=message):
        similarities(source, NAMES)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.preprocessing", None)
    with pytest.raises(ValueError, match=r'scikit-learn: pip install "pumalib\[language\]"'):
        losses.make("language", 3, 8, NAMES)
    # Who brings a matrix needs no texts.
    losses.make("language", 3, 8, NAMES, similarity=np.eye(3))


def test_the_module_is_imported_without_scikit_learn_and_pandas(monkeypatch):
    monkeypatch.setattr(losses, "texts", losses.texts)
    monkeypatch.delitem(sys.modules, "pumalib.losses.texts")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    importlib.import_module("pumalib.losses.texts")


def test_names_of_classes_reach_the_guided_loss_through_wrappers():
    expected = similarities("words", NAMES)
    alone = losses.make("language", 3, 8, NAMES)
    np.testing.assert_allclose(alone.similarity, expected, atol=1e-6)
    directed = losses.make("direction", 3, 8, NAMES, loss="language")
    np.testing.assert_allclose(directed.similarity, expected, atol=1e-6)


def test_a_run_guided_by_a_file_is_another_when_the_file_is(tmp_path, monkeypatch):
    file = tmp_path / "texts.csv"
    profile = config.profile("smoke", datasets=["flowers"], epochs=1, batch_size=90)
    settings = {"loss": "triplet", "texts": str(file)}
    run = profile.run("linear", loss="language", loss_settings=settings)
    classes = data.load(run.data).train[["class_name"]].drop_duplicates()
    classes.assign(text="the same").to_csv(file, index=False)
    before = run_folder.run_name(run)
    classes.assign(text=classes["class_name"]).to_csv(file, index=False)
    assert run_folder.run_name(run) != before

    made = []
    make = losses.make

    def made_and_noted(*args, **hyper):
        made.append(make(*args, **hyper))
        return made[-1]

    monkeypatch.setattr(losses, "make", made_and_noted)
    training.train(run, tmp_path / "run")
    assert made[-1].similarity.shape == (24, 24)
    assert 0 < made[-1].similarity.mean() < 1
