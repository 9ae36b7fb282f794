"""Scores during training: they draw nothing, choose the epoch that is kept, and say when to end."""

import dataclasses
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from PIL import Image

import pumalib
from pumalib import config, data, embedder, evaluation, paths, training
from pumalib.training import frozen, held_out, loop, parallel, run_folder

RECIPE = config.Training(epochs=4, batch_size=6, lr=1e-3, checkpoint_seconds=1e-9, device="cpu")
SCORED = replace(RECIPE, score_epochs=1)
PUMA = config.method("puma", prompts=4, adapter_rank=8)
# Two classes each; images are noise about one pattern a class.
CLASSES = {"train": ("cups", "hats", "keys"), "val": ("mugs", "pens"), "test": ("toys", "wigs")}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two datasets of seven classes of four images, with a split of train, val and test."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    lines = ["dataset,class_name,split"]
    for dataset in ("shop", "attic"):
        for split, names in CLASSES.items():
            for name in names:
                lines.append(f"{dataset},{name},{split}")
                folder = root / dataset / name
                folder.mkdir(parents=True)
                base = rng.integers(90, 166, (4, 5, 3))
                for number in range(4):
                    noise = np.clip(base + rng.integers(-90, 90, base.shape), 0, 255)
                    picture = Image.fromarray(noise.astype(np.uint8)).resize((60, 50))
                    picture.save(folder / f"{number}.png")
    (root / "split.csv").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def run(root):
    """Of a small PUMA, whose gates and augmentation are drawn at random."""
    images = config.Data(benchmark="folders", root=str(root), image_size=48)
    return config.Run(data=images, dim=16, training=SCORED, method=PUMA)


@pytest.fixture(scope="module")
def scored(run, tmp_path_factory):
    return training.train(run, tmp_path_factory.mktemp("runs") / "scored")


def weights(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def assert_same_weights(mine, its):
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, its[name]), name


def scores(folder):
    return [row[held_out.SCORE] for row in run_folder.read_record(folder)["log"]]


def put_scores(patch, values):
    """Report `values` in place of the epochs' scores; returns a list of the true scores."""
    found = []
    real = loop._held_out_score

    def told(setup, folder, epoch):
        found.append(real(setup, folder, epoch))
        return values[epoch - 1]

    patch.setattr(loop, "_held_out_score", told)
    return found


def trained_for(run, epochs, folder):
    """The weights after some epochs of training without scores."""
    recipe = replace(run.training, score_epochs=0, patience=0, epochs=epochs)
    return weights(training.train(replace(run, training=recipe), folder))


# ---- what is scored


def test_the_classes_of_val_are_scored_and_never_those_of_test(run):
    held = data.held_out(run.data)
    assert set(held.test["class_name"]) == set(CLASSES["val"])
    assert set(held.train["class_name"]) == set(CLASSES["train"])
    whole = data.load(run.data)
    assert set(whole.test["class_name"]) == set(CLASSES["test"])
    few = data.held_out(replace(run.data, shots=1))
    assert few.digest == held.digest, "shots are of training images"


def test_with_holdout_what_the_run_tests_is_scored(run):
    chosen = replace(run.data, holdout=True)
    assert data.held_out(chosen).digest == data.load(chosen).digest
    mini = config.Data(datasets=("flowers",), image_size=48, holdout=True)
    whole = data.load(replace(mini, holdout=False))
    assert set(data.held_out(mini).test["label"]) <= set(whole.train["label"])


def test_without_held_out_classes_it_is_refused_with_the_remedy(run, tmp_path):
    bare = replace(run, data=config.Data(datasets=("flowers",), image_size=48))
    message = (
        r"score_epochs needs held-out classes, .*'mini' has none: .*val .* data.holdout = True"
    )
    with pytest.raises(ValueError, match=message):
        training.run_name(bare)
    with pytest.raises(ValueError, match=message):
        training.train(bare, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dataset_with_too_few_of_them_is_named(run, root, tmp_path):
    rows = pd.read_csv(root / "split.csv")
    rows.loc[(rows["dataset"] == "attic") & (rows["class_name"] == "pens"), "split"] = "train"
    rows.to_csv(tmp_path / "split.csv", index=False)
    one = replace(run.data, split=str(tmp_path / "split.csv"))
    data.load(one)
    with pytest.raises(ValueError, match=r"classes of val as test: dataset 'attic': .* at least 2"):
        data.held_out(one)


# ---- names


def test_it_enters_a_name_only_where_it_is_on(run, root, tmp_path):
    plain = replace(run, training=RECIPE)
    record = dataclasses.asdict(plain)
    del record["training"]["score_epochs"], record["training"]["patience"]
    assert config.Run.from_dict(record) == plain
    content = plain.fingerprint("data", "weights")
    assert content == config.Run.from_dict(record).fingerprint("data", "weights")
    names = {content}
    for recipe in (SCORED, replace(SCORED, score_epochs=2), replace(SCORED, patience=2)):
        names.add(replace(run, training=recipe).fingerprint("data", "weights"))
    assert len(names) == 4


def test_other_images_to_score_make_another_name(run, root, tmp_path):
    rows = pd.read_csv(root / "split.csv")
    moved = rows[~((rows["class_name"] == "pens") & (rows["dataset"] == "attic"))]
    extra = [
        f"{row.dataset}/{row.class_name}/{n}.png,{row.split}"
        for row in moved.itertuples()
        for n in range(4)
    ]
    whole = [f"attic/pens/{n}.png,val" for n in range(4)]
    names = {}
    for kind, lines in (("all", whole), ("fewer", whole[:3])):
        file = tmp_path / f"{kind}.csv"
        file.write_text("\n".join(["path,split", *extra, *lines]))
        chosen = replace(run.data, split=str(file))
        for recipe in (RECIPE, SCORED):
            other = replace(run, data=chosen, training=recipe)
            names[kind, recipe.score_epochs] = training.run_name(other)
    assert names["all", 0] == names["fewer", 0], "not scored, they change nothing"
    assert names["all", 1] != names["fewer", 1]


# ---- the score


def test_the_score_is_that_of_the_model_of_its_epoch(run, scored, tmp_path):
    """The best epoch's model, embedded and searched again from its file."""
    record = run_folder.read_record(scored)
    best = held_out.best(record["log"])
    model = embedder.load(scored)
    held = data.held_out(run.data)
    vectors = embedder.embed_rows(model.model, held, held.test, run.data)
    table = evaluation.evaluate(
        vectors, held.test["label"].to_numpy(), held.test["dataset"].to_numpy()
    )
    assert best[held_out.SCORE] == pytest.approx(table.at["harmonic", "R@1"], abs=1e-9)
    assert best[held_out.SCORE] == max(scores(scored))
    assert record["environment"]["held_out"] == held.digest


def test_scores_draw_nothing_and_change_no_weight(run, tmp_path, monkeypatch):
    rising = [0.1, 0.2, 0.3, 0.4]
    found = put_scores(monkeypatch, rising)
    folder = training.train(run, tmp_path / "scored")
    assert len(found) == 4 and all(0 <= value <= 1 for value in found)
    assert_same_weights(weights(folder), trained_for(run, 4, tmp_path / "plain"))
    assert scores(folder) == rising


def test_the_best_epoch_is_kept_and_evaluated(run, tmp_path, monkeypatch):
    put_scores(monkeypatch, [0.1, 0.7, 0.7, 0.2])
    folder = training.train(run, tmp_path / "scored")
    expected = trained_for(run, 2, tmp_path / "two")
    after_four = trained_for(run, 4, tmp_path / "four")
    assert_same_weights(weights(folder), expected)
    assert any(not torch.equal(expected[name], after_four[name]) for name in expected)
    mine, its = (run_folder.read_record(tmp_path / name) for name in ("scored", "two"))
    assert mine["table"] == its["table"] and mine["hits"] == its["hits"]
    assert len(mine["log"]) == 4


def test_with_holdout_the_table_has_the_best_score(run, tmp_path):
    """With `holdout`, val replaces test, so that epochs are scored on the test images."""
    recipe = replace(SCORED, epochs=2)
    chosen = replace(run, data=replace(run.data, holdout=True), training=recipe)
    record = run_folder.read_record(training.train(chosen, tmp_path / "run"))
    table = {row["dataset"]: row["R@1"] for row in record["table"]}
    best = held_out.best(record["log"])
    assert table["harmonic"] == pytest.approx(best[held_out.SCORE], abs=1e-8)


def test_it_is_scored_every_so_many_epochs_and_at_the_end(run, tmp_path):
    recipe = replace(SCORED, epochs=5, score_epochs=2)
    folder = training.train(replace(run, training=recipe), tmp_path / "run")
    assert [value is not None for value in scores(folder)] == [False, True, False, True, True]

    log = pd.read_csv(folder / "log.csv")
    assert log["epoch"].tolist() == [1, 2, 3, 4, 5], "a line per epoch"
    assert list(log)[:4] == ["epoch", "loss", held_out.SCORE, "lr"]
    assert log[held_out.SCORE].isna().tolist() == [True, False, True, False, False]
    assert not log.drop(columns=held_out.SCORE).isna().any(axis=None)
    lines = (folder / "log.csv").read_text().splitlines()
    assert len(lines) == 6 and len({line.count(",") for line in lines}) == 1


def test_a_method_that_trains_nothing_is_not_scored(run, tmp_path):
    bare = replace(run, method=config.METHODS["pretrained"])
    assert run_folder.read_record(training.train(bare, tmp_path / "run"))["log"] == []


# ---- patience


@pytest.mark.parametrize(
    "values, patience, epochs, kept",
    [
        ([0.5, 0.4, 0.5, 0.9], 2, 3, 1),
        ([0.5, 0.4, 0.6, 0.5], 2, 4, 3),
        ([0.5, 0.4, 0.9, 0.9], 1, 2, 1),
        ([0.5, 0.4, 0.3, 0.2], 0, 4, 1),
    ],
)
def test_patience(values, patience, epochs, kept):
    recipe = replace(SCORED, patience=patience)
    log = []
    for epoch, value in enumerate(values, 1):
        log.append({"epoch": epoch, held_out.SCORE: value})
        if held_out.patience_is_over(recipe, log):
            break
    assert len(log) == epochs
    assert held_out.best(log)["epoch"] == kept


def test_epochs_without_a_score_cost_no_patience():
    recipe = replace(SCORED, score_epochs=2, patience=1)
    log = [{"epoch": 1, held_out.SCORE: None}, {"epoch": 2, held_out.SCORE: 0.5}]
    assert not held_out.patience_is_over(recipe, log)
    assert not held_out.patience_is_over(recipe, [*log, {"epoch": 3, held_out.SCORE: None}])
    assert held_out.patience_is_over(recipe, [*log, {"epoch": 4, held_out.SCORE: 0.5}])
    assert held_out.best([{"epoch": 1}]) is None, "a log from before there were scores"


def test_training_stops_when_patience_is_over(run, tmp_path, monkeypatch):
    put_scores(monkeypatch, [0.6, 0.5, 0.9, 0.9])
    impatient = replace(run, training=replace(SCORED, patience=1))
    folder = training.train(impatient, tmp_path / "run")
    assert scores(folder) == [0.6, 0.5]
    assert_same_weights(weights(folder), trained_for(run, 1, tmp_path / "one"))


# ---- after a stop


@pytest.mark.parametrize("step", [3, 7, 12, 13])
def test_a_stopped_run_goes_on_to_the_same_best_epoch(step, run, tmp_path, monkeypatch):
    """Four batches an epoch; the second epoch is the best."""
    values = [0.1, 0.7, 0.3, 0.2]
    put_scores(monkeypatch, values)
    whole = training.train(run, tmp_path / "whole")

    real = parallel.backward
    count = []

    def stop(*arguments):
        count.append(1)
        if len(count) == step:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parallel, "backward", stop)
        training.train(run, tmp_path / "stopped")
    assert (tmp_path / "stopped" / "checkpoint.pt").is_file()
    stopped = training.train(run, tmp_path / "stopped")
    assert_same_weights(weights(stopped), weights(whole))
    assert scores(stopped) == values
    ours, theirs = (run_folder.read_record(folder) for folder in (stopped, whole))
    assert ours["table"] == theirs["table"] and ours["open_loss"] == theirs["open_loss"]


@pytest.mark.parametrize("patience", [0, 1])
def test_one_stopped_after_its_last_score_trains_no_further(patience, run, tmp_path, monkeypatch):
    put_scores(monkeypatch, [0.5, 0.4, 0.3, 0.2])
    chosen = replace(run, training=replace(SCORED, patience=patience))
    whole = training.train(chosen, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "open_loss", lambda setup: (_ for _ in ()).throw(KeyboardInterrupt))
        training.train(chosen, tmp_path / "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "backward", None)
        training.train(chosen, tmp_path / "stopped")
    assert_same_weights(weights(tmp_path / "stopped"), weights(whole))


def test_a_checkpoint_from_before_there_were_scores_is_read(run, tmp_path, monkeypatch):
    plain = replace(run, training=replace(RECIPE, epochs=2))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "open_loss", lambda setup: (_ for _ in ()).throw(KeyboardInterrupt))
        training.train(plain, tmp_path / "run")
    for name in run_folder.CHECKPOINTS:
        state = torch.load(tmp_path / "run" / name, weights_only=True)
        assert state["at"].pop("best") == {}
        torch.save(state, tmp_path / "run" / name)
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "backward", None)
        training.train(plain, tmp_path / "run")
    assert_same_weights(weights(tmp_path / "run"), trained_for(run, 2, tmp_path / "two"))


# ---- what is told


def test_an_embedding_that_is_not_finite_says_when(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        loop, "embed_rows", lambda model, benchmark, rows, *_, **__: np.full((len(rows), 2), np.nan)
    )
    message = "after epoch 1: an embedding of a held-out image is not finite"
    with pytest.raises(training.NonFiniteLoss, match=message):
        training.train(run, tmp_path / "run")


def test_the_line_of_progress_has_the_best_score(run, tmp_path, monkeypatch, capsys):
    put_scores(monkeypatch, [0.25, 0.125, 0.125, 0.125])
    said = []
    real = loop.tqdm.set_postfix_str
    monkeypatch.setattr(
        loop.tqdm, "set_postfix_str", lambda bar, text, **_: (said.append(text), real(bar, text))
    )
    training.train(run, tmp_path / "run")
    assert "held-out" not in said[0]
    assert [text for text in said if text.endswith("held-out R@1 25.0% after epoch 1")]


@pytest.fixture
def profile(run, root, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    return config.Profile("own", data=run.data, dim=16, training=replace(SCORED, epochs=1))


def test_below_the_frozen_backbone_it_says_so_without_a_look_at_the_test_classes(
    profile, monkeypatch
):
    put_scores(monkeypatch, [0.0])
    message = r"finds [\d.]+% on the held-out classes, your model 0\.0% in its best epoch, 1 \(R@1"
    with pytest.warns(UserWarning, match=message) as said:
        folder = pumalib.train(profile, "linear")
    (text,) = [str(one.message) for one in said if "frozen" in str(one.message)]
    beside = re.search(r"to use it: pumalib\.load\('(.+?)'\)", text)[1]
    bare = pumalib.load(beside).run
    assert bare.method.name == "pretrained" and bare.data.holdout
    record = run_folder.read_record(paths.resolve(beside))
    assert set(data.load(bare.data).test["class_name"]) == set(CLASSES["val"])
    (harmonic,) = [row["R@1"] for row in record["table"] if row["dataset"] == "harmonic"]
    assert f"finds {100 * harmonic:.1f}%" in text
    assert {place.name for place in folder.parent.iterdir()} == {folder.name, record_name(beside)}


def record_name(folder):
    return paths.resolve(folder).name


def test_one_that_is_not_below_is_told_nothing_whatever_the_test_classes_say(
    profile, monkeypatch, recwarn
):
    put_scores(monkeypatch, [1.0])
    monkeypatch.setattr(frozen, "_on_test_images", None)
    pumalib.train(profile, "linear")
    assert not [one for one in recwarn if "frozen backbone" in str(one.message)]
