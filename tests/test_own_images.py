"""A user's folder of images with the commands, the page of results, and the frozen backbone."""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import forks
import numpy as np
import pandas as pd
import pytest
from PIL import Image

import pumalib
from pumalib import config, index, paths, search_page
from pumalib.__main__ import main
from pumalib.training import frozen


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory whose folder `photos` has four classes of four images."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    folder = tmp_path / "home"
    rng = np.random.default_rng(0)
    for name in ("cups", "hats", "keys", "mugs"):
        (folder / "photos" / name).mkdir(parents=True)
        base = rng.integers(0, 256, (4, 5, 3))
        for number in range(4):
            noise = np.clip(base + rng.integers(-20, 20, base.shape), 0, 255).astype(np.uint8)
            picture = Image.fromarray(noise).resize((60, 50), Image.Resampling.BICUBIC)
            picture.save(folder / "photos" / name / f"{number}.png")
    monkeypatch.chdir(folder)
    return folder


def call(capsys, *arguments):
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


# ---- commands


def test_embed_and_evaluate_where_the_shell_stands(home, capsys):
    (home / "photos" / "broken.jpg").write_bytes(b"no image")
    ask = ("embed", "photos", "-o", "vectors.npz", "--model", "mini")
    status, out, _ = call(capsys, *ask)
    assert status == 0
    assert "left out: broken.jpg cannot be read" in out
    assert "16 images in the index (0 unchanged, 16 new, 0 changed, 0 gone, 1 unreadable)" in out
    assert f"{home / 'vectors.npz'}: 16 x 128" in out
    stored = np.load(home / "vectors.npz")
    assert stored["paths"][0] == "cups/0.png"
    expected = pumalib.load("mini").embed(home / "photos" / "cups" / "0.png")
    np.testing.assert_allclose(stored["vectors"][:1], expected, atol=1e-5)

    status, out, _ = call(capsys, *ask)
    assert "16 unchanged, 0 new" in out, "nothing is embedded twice"

    table = pumalib.evaluate(stored["vectors"], [path[:4] for path in stored["paths"]])
    status, out, _ = call(capsys, "evaluate", "vectors.npz")
    assert status == 0
    assert out.startswith("all: 16 queries\n")
    assert f"R@1   {100 * table.at['all', 'R@1']:5.1f} [" in out


def test_embed_goes_on_where_it_was_stopped(home, capsys, monkeypatch):
    embed_parts = pumalib.embedder.Embedder.embed_parts

    def stopped(self, images, batch_size=64, workers=0):
        for number, part in enumerate(embed_parts(self, images, batch_size=4, workers=workers)):
            if number == 2:
                raise KeyboardInterrupt
            yield part

    ask = ("embed", "photos", "-o", "vectors.npz", "--model", "mini", "--store", "kept")
    with monkeypatch.context() as patch:
        patch.setattr(pumalib.embedder.Embedder, "embed_parts", stopped)
        assert call(capsys, *ask)[0] == 130
    assert not (home / "vectors.npz").exists()
    status, out, _ = call(capsys, *ask)
    assert status == 0
    assert "8 unchanged, 8 new" in out
    assert (home / "kept").is_dir()


def test_index_follows_and_search_writes_a_page(home, capsys):
    assert call(capsys, "index", "photos", "--model", "mini")[0] == 0
    shutil.copy("photos/cups/0.png", "photos/hats/same.png")
    (home / "photos" / "keys" / "3.png").unlink()
    status, out, _ = call(capsys, "index", "photos", "--model", "mini", "--near-duplicates", 0.9999)
    assert status == 0
    assert "(15 unchanged, 1 new, 0 changed, 1 gone, 0 unreadable)" in out
    assert re.search(
        r"1 groups of .*\n1  1\.000000  cups/0\.png\n1  1\.000000  hats/same\.png", out
    )

    shutil.copy("photos/keys/0.png", "query.png")
    ask = ("search", "photos", "query.png", "photos/cups/0.png", "--model", "mini", "-k", 2)
    status, out, _ = call(capsys, *ask, "--html", "page.html")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "query.png"
    assert lines[1] == "  1.000  keys/0.png"
    assert lines[3:5] == ["photos/cups/0.png", "  1.000  hats/same.png"]
    page = (home / "page.html").read_text()
    assert page.count("<img ") == 2 * (1 + 2)
    assert "http" not in re.sub(r'content="[^"]*"', "", page), "nothing is fetched"


def test_commands_refuse_in_words(home, capsys):
    for arguments, message in (
        (("embed", "nothing", "-o", "x.npz", "--model", "mini"), f"no folder {home / 'nothing'}"),
        (("index", "photos", "--model", "models/none"), "no folder models/none, here or in the"),
        (("index", "photos", "--model", "vit_smal"), "unknown backbone 'vit_smal'"),
        (("search", "photos", "x.png", "--model", "mini"), "holds no image yet"),
        (("evaluate", "none.npz"), "none.npz"),
    ):
        status, _, err = call(capsys, *arguments)
        assert status in (1, 2)
        assert message in err
        assert "Traceback" not in err


def test_a_model_and_weights_are_found_where_the_shell_stands(home, capsys, monkeypatch):
    pumalib.load("mini").save(home / "models" / "mine")
    status, out, _ = call(capsys, "index", "photos", "--model", "models/mine")
    assert status == 0
    assert "16 new" in out
    weights = paths.MINI / "mini_vit.safetensors"
    shutil.copy(weights, home / "weights.safetensors")
    assert call(capsys, "data", "verify", "--benchmark", "folders", "--root", "photos")[0] == 0
    given = {"root": "photos", "pretrained": "weights.safetensors", "split": None, "lr": 0.1}
    from pumalib.options import from_shell

    found = from_shell(given)
    assert found["root"] == str(home / "photos")
    assert found["pretrained"] == str(home / "weights.safetensors")
    assert from_shell({"root": "nowhere", "pretrained": "hub"}) == {
        "root": "nowhere",
        "pretrained": "hub",
    }
    monkeypatch.setattr(paths, "ROOT", home)
    assert from_shell(given)["root"] == "photos", "in the project a path stays as it was given"


def test_python_reads_where_the_shell_stands_too(home):
    """The project is elsewhere, and has none of these."""
    assert not (paths.ROOT / "photos").exists()
    pumalib.load("mini").save(home / "mine")
    model = pumalib.load("mine")
    found = index.FolderIndex(model, "photos", home / "store")
    assert found.update().new == 16
    (home / "own.yaml").write_text(
        "data: {benchmark: folders, root: photos, image_size: 48}\n"
        "training: {epochs: 1, batch_size: 6, device: cpu}\n"
    )
    folder = pumalib.train("own.yaml", "whitened")
    assert pumalib.read_scores(folder).at["unified", "queries"] == 8
    went_on = pumalib.train("own.yaml", "full", pretrained="mine")
    assert pumalib.load(went_on).run.pretrained == "mine"


def test_what_is_found_is_written_for_programs(home, capsys):
    ask = ("index", "photos", "--model", "mini")
    shutil.copy("photos/cups/0.png", "photos/hats/same.png")
    files = ("--csv", "out.csv", "--json", "out.json", "--html", "out.html")
    assert call(capsys, *ask, "--near-duplicates", 0.99999, *files)[0] == 0
    expected = ["cups/0.png", "hats/same.png"]
    table = pd.read_csv("out.csv")
    assert table["path"].tolist() == expected and table["group"].tolist() == [1, 1]
    rows = json.loads((home / "out.json").read_text())
    assert [row["path"] for row in rows] == expected
    assert rows[0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert (home / "out.html").read_text().count("<img ") == 2

    # Four cups, of which a fifth lies among the hats.
    status, out, _ = call(capsys, *ask, "--wrong-labels", "-k", 3, *files)
    assert status == 0
    assert "hats/same.png  3 of 3 in cups" in out
    suspects = pd.read_csv("out.csv").set_index("path")
    assert suspects.loc["hats/same.png", ["suggested", "votes", "of"]].tolist() == ["cups", 3, 3]
    page = (home / "out.html").read_text()
    assert "hats/same.png: 3 of 3 in cups" in page

    search = ("search", "photos", "photos/keys/0.png", "photos/mugs/0.png", "--model", "mini")
    assert call(capsys, *search, "-k", 2, *files)[0] == 0
    rows = json.loads((home / "out.json").read_text())
    assert [(row["query"], row["rank"]) for row in rows] == [
        (f"photos/{name}/0.png", rank) for name in ("keys", "mugs") for rank in (1, 2)
    ]
    pd.testing.assert_frame_equal(pd.DataFrame(rows), pd.read_csv("out.csv"), atol=1e-6)

    status, _, err = call(capsys, *ask, "--csv", "x.csv")
    assert status == 2 and "give one of --near-duplicates, --wrong-labels" in err
    status, _, err = call(capsys, "embed", "photos", "-o", "v.csv", "--model", "mini")
    assert status == 2 and "-o v.csv: a file of numpy is written, name it *.npz" in err
    assert not (home / "v.csv").exists() and not (home / "x.csv").exists()


def test_a_name_is_no_command_to_the_terminal(home, capsys):
    (home / "photos" / "cups" / "0.png").rename(home / "photos" / "cups" / "\x1b[2J.png")
    assert call(capsys, "index", "photos", "--model", "mini")[0] == 0
    ask = ("search", "photos", "photos/cups/1.png", "--model", "mini", "-k", 15)
    status, out, _ = call(capsys, *ask)
    assert status == 0
    assert "cups/\\x1b[2J.png" in out and "\x1b" not in out


def test_names_in_errors_and_warnings_are_none_either(home):
    """In a process of its own, where warnings are shown as on a terminal."""
    hats = (home / "photos" / "hats").rename(home / "photos" / "hats \x1b[2J")
    (hats / "0.png").write_bytes(b"no image")
    (hats / "lost.png").symlink_to("nowhere")
    asked = ["data", "prepare", "--benchmark", "folders", "--root", "photos"]
    text = f"import sys\nfrom pumalib.__main__ import main\nsys.exit(main({asked!r}))"
    done = forks.run(text, home)
    assert done.returncode == 2
    said = done.stderr
    assert "links lead nowhere" in said and "1 images cannot be prepared" in said
    assert "hats \\x1b[2J/0.png" in said and "\x1b" not in said


def test_an_advised_command_works_as_it_stands(home, capsys):
    (home / "photos").rename(home / "my photos")
    ask = ("search", "my photos", "my photos/cups/0.png", "--model", "mini")
    status, _, err = call(capsys, *ask)
    assert status == 1 and "update()" not in err
    command = re.search(r"run `python -m pumalib (.*?)` first", err)[1]
    assert call(capsys, *shlex.split(command))[0] == 0
    assert call(capsys, *ask)[0] == 0


def test_a_page_is_written_though_nobody_reads_the_rest(home, capsys):
    """As with `| head -1`: the pipe is closed before the first line."""
    assert call(capsys, "index", "photos", "--model", "mini", "--store", "kept")[0] == 0
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pumalib", "search", "photos", "photos/cups/0.png"]
    done = subprocess.run(
        [*command, "--model", "mini", "--store", "kept", "--html", "page.html"],
        env={**os.environ, "PYTHONPATH": str(Path(pumalib.__file__).parent.parent)},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert (home / "page.html").read_text().count("<img ") == 8


def test_interrupted_each_command_says_what_it_leaves(home, capsys, monkeypatch):
    def stop(*given, **named):
        raise KeyboardInterrupt

    assert call(capsys, "index", "photos", "--model", "mini")[0] == 0
    monkeypatch.setattr(index.FolderIndex, "update", stop)
    monkeypatch.setattr(index.FolderIndex, "search", stop)
    monkeypatch.setattr(pumalib.evaluation, "evaluate_files", stop)
    for arguments, said in (
        (("index", "photos", "--model", "mini"), "16 images are embedded and kept"),
        (("embed", "photos", "-o", "v.npz", "--model", "mini"), "16 images are embedded and kept"),
        (("search", "photos", "x.png", "--model", "mini"), "nothing was written"),
        (("evaluate", "v.npz"), "nothing was written"),
    ):
        status, _, err = call(capsys, *arguments)
        assert status == 130 and said in err and "checkpoints" not in err


# ---- the page


def test_a_page_has_small_pictures_and_escaped_names(tmp_path):
    name = '<b>&"x.png'
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / name)
    found = pd.DataFrame({"path": [name, "gone.png"], "cosine": [0.5, 0.25]})
    search_page.write(
        [search_page.Answer(tmp_path / name, found)], tmp_path, tmp_path / "p.html", "a < b"
    )
    page = (tmp_path / "p.html").read_text()
    assert "<b>" not in page and "&lt;b&gt;&amp;&quot;x.png" in page
    assert "<title>a &lt; b</title>" in page
    pictures = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    assert len(pictures) == 3
    with Image.open(BytesIO(base64.b64decode(pictures[1]))) as picture:
        assert picture.size == (144, 72)
        assert picture.getpixel((9, 9))[0] > 200
    with Image.open(BytesIO(base64.b64decode(pictures[2]))) as picture:
        assert len(set(picture.getpixel((9, 9)))) == 1, "what has gone is grey"


def test_a_page_is_never_huge(tmp_path):
    found = pd.DataFrame({"path": ["x.png"] * 3000, "cosine": 0.5})
    answer = search_page.Answer(tmp_path / "x.png", found)
    with pytest.raises(ValueError, match="3,001 pictures are too many .* at most 2,500: ask for"):
        search_page.write([answer], tmp_path, tmp_path / "p.html", "x")
    assert not list(tmp_path.iterdir())


# ---- below the frozen backbone


def profile(home, **changes):
    return config.Profile(
        "own",
        data=config.Data(benchmark="folders", root=str(home / "photos"), image_size=48),
        dim=16,
        training=config.Training(batch_size=6, device="cpu", **{"epochs": 1, **changes}),
    )


def trained_find_little(monkeypatch, unified):
    """Let trained models, which are linear here, have these accuracies; the frozen one its own."""
    accuracies = frozen._accuracies

    def stated(record):
        if record["run"]["method"]["name"] == "linear":
            return {"unified": unified, "harmonic": 0.25}
        return accuracies(record)

    monkeypatch.setattr(frozen, "_accuracies", stated)


def test_a_model_below_its_frozen_backbone_says_so(home, monkeypatch):
    trained_find_little(monkeypatch, 0.25)
    with pytest.warns(UserWarning, match="the frozen backbone finds .*% on these folders") as said:
        folder = pumalib.train(profile(home), "linear")
    text = str(said[0].message)
    assert "your model 25.0% (R@1; pumalib.read_scores has the intervals); to use it: " in text
    beside = re.search(r"pumalib\.load\('(.+?)'\)", text)[1]
    bare = pumalib.load(beside)
    assert bare.run.method.name == "pretrained"
    scores = pumalib.read_scores(beside)
    assert f"finds {100 * scores.at['unified', 'R@1']:.1f}%" in text
    assert {run.name for run in folder.parent.iterdir()} == {folder.name, Path(beside).name}


def test_a_run_that_ends_below_prints_lines_that_work(home, capsys):
    """A network of one number an image finds less: nothing is stated here, all is measured."""
    with pytest.warns(UserWarning, match="the frozen backbone finds") as said:
        folder = pumalib.train(replace(profile(home), dim=1), "linear")
    text = str(said[0].message)
    line, name = re.search(r"to use it: (pumalib\.load\('.+?'\)), or --model (\S+);", text).groups()
    bare = eval(line, {"pumalib": pumalib})

    test = ["keys", "mugs"]
    files = sorted(file for one in test for file in (home / "photos" / one).iterdir())
    labels = [file.parent.name for file in files]
    by_model, by_bare = (
        pumalib.evaluate(model.embed(files), labels).at["all", "R@1"]
        for model in (pumalib.load(folder), bare)
    )
    assert by_model < by_bare
    assert f"finds {100 * by_bare:.1f}% on these folders, your model {100 * by_model:.1f}%" in text

    assert call(capsys, "embed", "photos", "-o", "vectors.npz", "--model", name)[0] == 0
    stored = np.load(home / "vectors.npz")
    expected = bare.embed([home / "photos" / path for path in stored["paths"]])
    np.testing.assert_allclose(stored["vectors"], expected, atol=1e-5)


def test_the_command_warns_too(home, capsys, monkeypatch):
    trained_find_little(monkeypatch, 0.125)
    (home / "own.yaml").write_text(
        "data: {benchmark: folders, root: photos, image_size: 48}\ndim: 16\n"
        "training: {epochs: 1, batch_size: 6, device: cpu}\n"
    )
    ask = ("train", "linear", "--profile", "own.yaml", "-p", "root=photos")
    with pytest.warns(UserWarning, match=r"your model 12\.5% \(harmonic mean of datasets 25\.0%\)"):
        status, out, _ = call(capsys, *ask)
    assert status == 0
    assert "/own/runs/linear-curricularface-" in out


def test_a_model_above_it_is_told_nothing(home, monkeypatch, recwarn):
    accuracies = frozen._accuracies
    monkeypatch.setattr(
        frozen,
        "_accuracies",
        lambda record: (
            {"unified": 1, "harmonic": 1}
            if record["run"]["method"]["name"] == "linear"
            else accuracies(record)
        ),
    )
    first = pumalib.train(profile(home), "linear")
    second = pumalib.train(profile(home, lr=1e-3), "linear")
    assert not [one for one in recwarn if "frozen backbone" in str(one.message)]
    runs = {folder.name.split("-")[0] for folder in first.parent.iterdir()}
    assert second.parent == first.parent
    assert runs == {"linear", "pretrained"}
    assert len(list(first.parent.iterdir())) == 3, "one frozen backbone for both"


def test_training_goes_on_from_a_saved_model(home):
    folder = pumalib.train(profile(home), "linear", seed=1)
    start = pumalib.load(folder).save(home / "start")
    went_on = pumalib.train(profile(home), "linear", pretrained=str(start))
    assert pumalib.load(went_on).run.pretrained == str(start)
    assert np.isfinite(pumalib.read_scores(went_on).at["unified", "R@1"])
