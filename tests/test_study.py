"""Runs are trained once, kept, found again, distinguished, and gathered into one table.

Models are analysed by their names.
"""

import contextlib
import json
import multiprocessing
import pkgutil
import shutil
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from kept_runs import add, add_failed

import puma_study as study
from puma_study import analysis, figures, needs, runs, store
from puma_study import results as kept_results
from pumalib import config, data, evaluation, paths, training
from pumalib.training import loop, run_folder

PROFILE = config.Profile(
    "test",
    data=config.Data(datasets=("photos", "aircraft"), image_size=48),
    backbone="test_vit",
    pretrained="random",
    dim=16,
    seeds=(0, 1),
    rank_scale=0.1,
    training=config.Training(epochs=1, batch_size=100, lr=1e-3, device="cpu"),
)
ONE = replace(PROFILE, seeds=(0,))
ROWS = {"Linear": PROFILE.run("linear"), "PUMA": PROFILE.run("puma")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", tmp_path_factory.mktemp("results"))
        study.run_all(ROWS, PROFILE)
        study.run_all({"each": study.specific(PROFILE.run("linear"))}, ONE)
        yield paths.RESULTS


@pytest.fixture
def results(trained, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", trained)
    return study.run_all(ROWS, PROFILE)


@pytest.fixture
def copied(trained, tmp_path, monkeypatch):
    """Numbers as in a fresh clone: lines and no folders."""
    (tmp_path / "test").mkdir()
    shutil.copy(trained / "test" / "kept-1.jsonl", tmp_path / "test")
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return tmp_path / "test"


def test_no_public_function_has_the_name_of_a_module():
    """Else it is the function until something imports the module, and then that."""
    modules = {module.name for module in pkgutil.iter_modules(study.__path__)}
    assert modules.isdisjoint(set(study.__all__) - set(study._MODULES))


def test_rows_become_a_table(results):
    wide = results.wide("R@1")
    assert list(wide.index) == ["Linear", "PUMA"]
    assert list(wide.columns) == ["photos", "aircraft", "unified", "harmonic"]
    assert results.parameters.loc["Linear", "trainable"] == 64 * 16 + 16

    tidy = results.tidy
    assert set(tidy["seeds"]) == {2}
    assert (tidy["low"] <= tidy["value"]).all()
    assert (tidy["value"] <= tidy["high"]).all()
    hits = [store.record(name, "test").hits()["unified"] for name in results.names["PUMA"]]
    assert len(hits) == 2
    assert wide.loc["PUMA", "unified"] == pytest.approx(np.mean(hits), abs=1e-7)


def test_a_table_is_saved_as_it_stands(results):
    columns = [
        "row",
        "dataset",
        "metric",
        "value",
        "low",
        "high",
        "sd",
        "seeds",
        "runs",
        "profile",
        "device",
    ]
    results.save("table")
    saved = paths.RESULTS / results.profile / "table.csv"
    assert list(pd.read_csv(saved).columns) == columns
    of_nothing = replace(results, tidy=results.tidy.assign(value=np.nan))
    with pytest.raises(ValueError, match="table.csv: a score is no finite number"):
        of_nothing.save("table")


def test_kept_runs_are_taken_without_folders_and_changed_ones_are_trained(
    copied, results, monkeypatch
):
    monkeypatch.setattr(training, "train", None)
    monkeypatch.setattr(paths, "RESULTS", copied.parent)
    copied.chmod(0o555)  # reading needs no right to write
    try:
        again = study.run_all({"ours": ROWS["PUMA"]}, PROFILE)
    finally:
        copied.chmod(0o755)
    assert again.names["ours"] == results.names["PUMA"]
    assert not (copied / "runs").exists()
    with pytest.raises(TypeError):
        study.run_all({"ours": PROFILE.run("puma", adapter_keep=0.3)}, PROFILE)


NAN = PROFILE.run("linear", training={"lr": 1e30, "clip_value": 0.0})
MLP = PROFILE.run("mlp3")


@pytest.fixture
def failing(copied):
    """Rows, two of which fail in their first seed, and so in all."""
    return {"bad": NAN, "Linear": ROWS["Linear"], "too": replace(NAN, dim=8)}


def test_a_failed_run_stops_no_other_and_is_told_by_name(failing, copied):
    rows = {"bad": NAN, "new": PROFILE.run("mlp3")}
    name = training.run_name(NAN)
    message = rf"{name} \(epoch 1, batch \d: the loss is .*runs remove {name} --yes"
    with pytest.raises(store.Failed, match=message):
        study.run_all(rows, ONE)
    assert training.run_name(rows["new"]) in store.read("test"), "the other was trained"
    assert store.failures("test").keys() == {name}
    record = store.failures("test")[name]
    assert record.settings == NAN
    assert record.content()["environment"]["torch"] == torch.__version__

    def train(*arguments):
        raise AssertionError("it is trained again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train", train)
        with pytest.raises(store.Failed, match=message):
            study.run_all(rows, replace(ONE, train=False))
        with pytest.raises(store.Failed, match=message), store.held(store.folder(name, "test")):
            raise AssertionError("it is let in")
    runs.remove(name, "test")
    with pytest.raises(store.NotKept, match="1 of 2 runs"):
        study.run_all(rows, replace(ONE, train=False))


def test_a_run_that_failed_in_another_process_meanwhile_stops_no_other(copied, monkeypatch):
    bad = training.run_name(NAN)
    other = replace(MLP, dim=8)
    train = training.train

    def train_while_another_fails(run, folder, position=""):
        environment = {"device": "cpu"}
        failed = {"name": bad, "run": json.loads(NAN.to_json()), "environment": environment}
        add_failed({**failed, "where": "epoch 9", "what": "the loss is nan"})
        return train(run, folder, position)

    monkeypatch.setattr(training, "train", train_while_another_fails)
    rows = {"a": MLP, "bad": NAN, "b": other}
    with pytest.raises(store.Failed, match=rf"{bad} \(epoch 9: the loss is nan\)"):
        study.run_all(rows, ONE)
    assert {training.run_name(MLP), training.run_name(other)} <= store.read("test").keys()


def test_rows_that_may_fail_are_left_out_and_named(failing, copied):
    results = study.run_all(failing, ONE, may_fail=failing)
    assert list(results.wide().index) == ["Linear"] and list(results.names) == ["Linear"]
    assert results.failed.keys() == {"bad", "too"}
    assert f"{training.run_name(NAN)} (epoch 1, batch " in results.failed["bad"]
    with pytest.raises(store.Failed, match=training.run_name(replace(NAN, dim=8))):
        study.run_all(failing, ONE, may_fail=["bad"])
    plan = study.plan(failing, ONE)
    assert plan["kept"].all(), "nothing would be trained"
    none = study.run_all({"bad": NAN}, ONE, may_fail=["bad"])
    assert none.tidy.empty and none.parameters.empty and list(none.failed) == ["bad"]


def test_a_head_of_features_that_are_not_finite_is_kept_as_failed(copied, monkeypatch):
    monkeypatch.setattr(loop, "embed_rows", lambda *args, **options: np.full((4, 64), np.nan))
    row = {"whitened": PROFILE.run("whitened", dim=64)}
    failed = study.run_all(row, ONE, may_fail=row).failed
    assert "(before training: a feature is not finite)" in failed["whitened"]
    (line,) = store.failures("test").values()
    assert line.environment.device == "cpu"


def test_a_kept_run_of_other_few_images_is_not_taken(copied):
    rows = {"few": PROFILE.run("linear", data=replace(PROFILE.data, shots=1))}
    _, of_seed_1 = study.run_all(rows, PROFILE).names["few"]
    content = store.record(of_seed_1, "test").content()
    content["environment"]["data"] = "0" * 64
    store.drop(of_seed_1, "test")
    add(content)
    with pytest.raises(ValueError, match=f"{of_seed_1} was trained on other images: .*remove"):
        study.run_all(rows, PROFILE)


def test_an_ensemble_with_a_failed_member_has_failed(copied):
    rows = {"each": study.specific(NAN)}
    results = study.run_all(rows, ONE, may_fail=rows)
    assert results.names == {}
    assert len(store.failures("test")) == 2
    assert all(name in results.failed["each"] for name in store.failures("test"))


def test_a_kept_run_that_fails_when_it_is_trained_again_stays_kept(copied, monkeypatch):
    name = training.run_name(ROWS["Linear"])

    def train(run, folder, position=""):
        raise training.NonFiniteLoss("now it is not finite")

    monkeypatch.setattr(training, "train", train)
    with pytest.raises(training.NonFiniteLoss, match="^now it is not finite$"):
        study.model(name, "test", train=True)
    assert name in store.read("test") and store.lines("test", store.FAILED) == []


def test_side_rows_have_their_seeds_and_what_is_kept_besides(results, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    profile = replace(PROFILE, seeds=(1, 0, 2), side_seeds=(1,))  # seed 2 is not kept
    side = study.run_all(ROWS, profile, side=ROWS)
    assert side.names == {row: names[::-1] for row, names in results.names.items()}


def test_any_row_has_further_seeds_once_they_are_kept(results, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    profile = replace(PROFILE, seeds=(0,), further_seeds=(1, 2))  # seed 2 is not kept
    assert study.run_all(ROWS, profile).names == results.names
    assert config.profile("mini", seeds=[7]).further_seeds == ()
    with pytest.raises(ValueError, match="further_seeds: give each once, and none of seeds"):
        replace(PROFILE, seeds=(0,), further_seeds=(1, 0))


def test_embeddings_of_a_kept_run_give_its_numbers(results):
    name = results.names["PUMA"][0]
    embeddings, images = study.embeddings(name, "test")
    table = evaluation.scores(embeddings, images, (1,)).table(0)["R@1"]
    stored = store.record(name, "test").scores()["R@1"]
    pd.testing.assert_series_equal(table, stored, check_names=False)
    assert study.model(name, "test").run == study.run_of(name, "test") == ROWS["PUMA"]


@pytest.fixture
def both(results):
    """Specific linear models as one row, and the universal one."""
    return study.run_all(
        {"specific": study.specific(ROWS["Linear"]), "Linear": ROWS["Linear"]}, ONE
    )


@pytest.fixture
def members(both):
    """The runs of the ensemble by their datasets."""
    names = store.record(both.names["specific"][0], "test").members
    return dict(zip(["photos", "aircraft"], names))


def test_an_ensemble_is_its_members_and_their_mean(both, members):
    for dataset, name in members.items():
        assert study.run_of(name, "test").data.datasets == (dataset,)
    first, images = study.embeddings(members["photos"], "test", PROFILE.data)
    second, _ = study.embeddings(members["aircraft"], "test", PROFILE.data)
    mean = evaluation.scores((first + second) / 2, images, (1,)).table(0)["R@1"]
    wide = both.wide().loc["specific"]
    assert wide["unified"] == pytest.approx(mean["unified"], abs=1e-6)

    own = {}
    for dataset, name in members.items():
        own[dataset] = study.collect({"x": [name]}, "test").wide().at["x", dataset]
    assert dict(wide[["photos", "aircraft"]]) == pytest.approx(own)
    assert wide["harmonic"] == pytest.approx(2 / sum(1 / value for value in own.values()))
    total = both.parameters["total"]
    assert total["specific"] == 2 * total["Linear"]


def test_specific_models_see_as_many_images_as_the_universal_one_where_asked():
    run = PROFILE.run("linear", training={"epochs": 6, "step_epochs": 2})
    seen = 6 * study.rows.training_images(run)
    members = study.specific(run, same_images=True)
    for member in members:
        images = study.rows.training_images(member)
        # Rounded to whole epochs.
        assert abs(member.training.epochs * images - seen) <= images / 2
        assert member.training.step_epochs == round(2 * seen / 6 / images)
        alone = replace(member, training=run.training)
        assert alone in study.specific(run)
    assert len(members) == 2


def test_an_ensemble_is_no_model_and_may_be_missing(both):
    with pytest.raises(store.NotKept, match="0 of 2 runs and 1 ensembles are not kept"):
        study.run_all({"mean": (ROWS["Linear"], ROWS["PUMA"])}, replace(ONE, train=False))
    with pytest.raises(ValueError, match="is an ensemble of linear-"):
        study.model(both.names["specific"][0], "test")


def test_a_model_that_was_not_kept_is_trained_again_only_on_demand(copied, results, monkeypatch):
    name = results.names["Linear"][0]
    before, _ = study.embeddings(name, "test")
    monkeypatch.setattr(paths, "RESULTS", copied.parent)
    said = f"only the numbers .*{name} .* train=True .*puma_study runs train {name}"
    with pytest.raises(store.NotKept, match=said):
        study.embeddings(name, "test")
    again, _ = study.embeddings(name, "test", train=True)
    np.testing.assert_allclose(again, before, atol=1e-5)
    assert store.record(name, "test").agrees(store.record_in(store.folder(name, "test")))
    with pytest.raises(ValueError, match="no run 'linear-' is kept in profile 'test'; near: "):
        study.model("linear-", "test")


def test_a_plan_tells_runs_and_trains_none(results, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    rows = {
        **ROWS,
        "none": PROFILE.run("pretrained"),
        "new": study.specific(PROFILE.run("linear", dim=8)),
    }
    table = study.plan(rows, PROFILE)
    assert table["kept"].tolist() == [True] * 4 + [False] * 6
    assert table.loc[results.names["PUMA"][0], "hours"] > 0
    images = len(data.load(PROFILE.data).train)
    assert table["images"].tolist()[:6] == [images] * 4 + [0] * 2
    assert table["hours"].notna().all()  # the speed is that of the kept linear runs

    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_plan_without_measured_runs_goes_by_the_stated_speed(tmp_path, monkeypatch):
    """By hand: a mini_vit has 5 layers of 37 tokens of 128 numbers, a ViT-S 12 of 197 of 384."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    run = replace(PROFILE.run("linear"), backbone="mini_vit")
    table = study.plan({"x": run}, ONE, images_per_second=100)
    assert not table["measured"].any()
    of_mini = 5 * 37 * (12 * 128**2 + 2 * 37 * 128)
    of_small = 12 * 197 * (12 * 384**2 + 2 * 197 * 384)
    seconds = table["images"] / 100 * of_mini / of_small
    np.testing.assert_allclose(table["hours"], seconds / 3600)
    assert (table["data"] == "").all() and (table["weights"] == "").all()


PAPER_NEEDS = {
    ("full", "bfloat16", 0, False): 22.8,
    ("puma", "bfloat16", 0, False): 20.4,
    ("puma+lora", "bfloat16", 0, False): 26.7,
    ("puma", "bfloat16", 0, True): 2.8,
    ("puma", "bfloat16", 360, False): 10.2,
    ("puma", "float32", 0, False): 40.8,
    ("puma", "auto", 0, False): 40.8,
    ("linear", "bfloat16", 0, False): 22.8 / 12,
}


@pytest.mark.parametrize("setting, gigabytes", PAPER_NEEDS.items(), ids=map(str, PAPER_NEEDS))
def test_memory_is_what_was_measured_and_grows_as_activations_do(setting, gigabytes):
    method, precision, micro_batch, recompute = setting
    training = config.Training(
        batch_size=720, precision=precision, micro_batch=micro_batch, recompute=recompute
    )
    run = config.Run(
        data=config.Data(benchmark="paper", root="x"),
        backbone="vit_small_patch16_224.augreg_in21k",
        pretrained="hub",
        method=config.METHODS[method],
        training=training,
    )
    weights = 21.7e6 * (16 if method == "full" else 4)
    assert needs.memory(run) == pytest.approx(gigabytes * 1e9 + weights, rel=2e-3)
    half = replace(run, training=replace(training, batch_size=360, micro_batch=0))
    if not micro_batch:
        saved = needs.memory(run) - weights
        assert needs.memory(half) - weights == pytest.approx(saved / 2, rel=0.02)


def test_what_no_network_of_this_kind_needs_is_said_to_be_unknown():
    run = config.Run(backbone="resnet18", pretrained="random", method=config.METHODS["full"])
    assert np.isnan(needs.memory(run))
    assert needs.relative_cost(run) == 1


def test_a_plan_needs_no_texts_that_a_notebook_makes_first(results, tmp_path):
    settings = {"loss": "ms", "texts": str(tmp_path / "pseudo.csv")}
    rows = {"guided": PROFILE.run("linear", loss="language", loss_settings=settings)}
    table = study.plan(rows, PROFILE)
    assert not table["kept"].any()
    assert (table["images"] == len(data.load(PROFILE.data).train)).all()
    with pytest.raises(ValueError, match="there is no file"):
        run_folder.run_name(rows["guided"])


def test_a_plan_needs_no_images_of_the_paper(results, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    missing = config.Data(benchmark="paper", root=str(tmp_path / "nothing"), image_size=48)
    run = PROFILE.run("puma", data=missing)
    table = study.plan({"x": study.specific(run), "y": run}, ONE)
    counts = study.printed.table(1)["train_samples"][list(study.printed.PAPER_DATASETS)].tolist()
    assert table["images"].tolist() == [*counts, sum(counts)]
    assert not table["kept"].any()
    command = f"python -m pumalib data download --root {tmp_path / 'nothing'}"
    assert table["data"].str.contains(f"`{command}` fetches them").all()
    assert (table["weights"] == "").all(), "they are embedded"

    nowhere = study.plan({"y": PROFILE.run("puma", pretrained=str(tmp_path / "w.pth"))}, ONE)
    assert nowhere["weights"].tolist()[0].startswith(f"no weights at {tmp_path / 'w.pth'}; give")
    assert not nowhere["kept"].any()


PRINTED = pd.DataFrame({"cub": [80.0, 70.0], "unified": [80.0, 60.0]}, index=["PUMA", "Linear"])


def test_differences_are_in_points_beside_the_paper(results):
    difference = results.difference("PUMA", "Linear")
    gain = results.wide()["unified"].diff()["PUMA"]
    assert difference.at["unified", "value"] == pytest.approx(gain, abs=1e-7)

    pairs = [("PUMA", "Linear"), ("PUMA", "absent"), ("PUMA", "PUMA")]
    said = results.differences(pairs, PRINTED, ("unified",))
    columns = ["value", "low", "high", "p_greater", "p_less"]
    *points, above, below = (100 * difference.loc["unified", columns]).tolist()
    expected = np.array([points, [0, 0, 0]])
    assert said[["points", "low", "high"]].to_numpy() == pytest.approx(expected, abs=0.051)
    assert said["p"][0] == pytest.approx(min(above, below) / 50, abs=1e-4)
    assert said["paper"].tolist() == [20, 0]


def test_differences_are_read_by_pair_with_intervals_and_what_is_printed():
    numbers = [
        ("PUMA over frozen", 2.0, 1.0, 3.0, np.nan),
        ("PUMA over LoRA", -0.5, -1.0, 0.04, 5.2),
    ]
    table = pd.DataFrame(numbers, columns=["difference", "points", "low", "high", "paper"])
    both = pd.concat([table.assign(of=of) for of in ("unified", "harmonic")])

    shown = study.readable(both)

    assert shown.index.tolist() == ["PUMA minus Frozen backbone", "PUMA minus LoRA"]
    columns = ["unified", "paper: unified", "harmonic", "paper: harmonic"]
    assert shown.columns.tolist() == columns
    assert shown["unified"].tolist() == ["+2.0 [+1.0, +3.0]", "-0.5 [-1.0, +0.0]"]
    assert shown["paper: unified"].tolist() == ["", "+5.2"]
    assert study.readable(both.drop(columns="paper")).columns.tolist() == ["unified", "harmonic"]


def test_a_table_is_shown_with_its_best_marked(results):
    table = results.with_paper_values(PRINTED)
    values = results.wide()
    shown = study.marked(table, values).data
    first, second = values["unified"].sort_values(ascending=False).index[:2]
    number = f"{100 * values.at[first, 'unified']:.1f}"
    cell = table.at[first, "unified"]
    assert table.columns[0] == "seeds"
    assert cell.startswith(f"{number} [")
    assert cell.endswith(f"] (paper {PRINTED.at[first, 'unified']:.1f})")

    span, said = cell.removeprefix(f"{number} ").split(" (")
    below = [part.replace(" ", "&nbsp;") for part in (span, f"({said}")]
    small = "".join(f"<br><small>{part}</small>" for part in below)
    assert shown.at[first, "unified"] == f"<b>{number}</b>{small}"
    assert shown.at[second, "unified"].startswith("<u>")
    assert shown["photos"].str.contains("<[bu]>").all()
    alone = study.marked(table.loc[[second]], values).data
    assert alone.at[second, "unified"] == shown.at[second, "unified"], "second of all rows"
    assert study.marked(table[:0], values).data.empty


def test_a_table_calls_its_rows_as_figures_do():
    table = pd.DataFrame({"cars_196": [70.0, 60.0]}, index=["full", "prompt-pool"])
    html = study.marked(table, table / 100).to_html()
    assert all(name in html for name in ("Full fine-tuning", "Prompt pool", ">cars<"))
    assert "cars_196" not in html
    assert figures.shown("full, npair") == "Full fine-tuning, N-pair"


def test_names_of_folders_are_no_tags_where_they_are_shown():
    name = "<img src=x onerror=alert(1)>"
    table = pd.DataFrame({name: ["71.2 [70.1, 72.3]", name]}, index=[name, "Linear"])
    shown = study.marked(table, pd.DataFrame({name: [0.7, 0.6]}, index=table.index)).to_html()
    assert "<img" not in shown and shown.count("&lt;img") == 3
    assert "<b>71.2</b><br><small>[70.1,&nbsp;72.3]</small>" in shown
    assert study.plain("a_b*<i>") == r"a\_b\*&lt;i&gt;"
    assert study.plain("photos 2") == "photos 2"
    assert study.plain("one\n\n| two `x` |\r\n# three") == r"one \| two \`x\` \| \# three"


def test_large_datasets_are_those_that_the_profile_names():
    named = replace(PROFILE, data=config.Data(image_size=48), large=("flowers", "aircraft"))
    assert study.claims.large(named) == ("flowers", "aircraft")
    assert study.claims.large(replace(named, large=())) == ()
    assert study.claims.large(replace(PROFILE, large=("aircraft", "flowers"))) == ("aircraft",)
    with pytest.raises(ValueError, match="unknown large dataset 'aircrafts'; known: .*aircraft"):
        study.claims.large(replace(named, large=("aircrafts",)))
    sizes = data.load(config.Data(benchmark="mini")).train["dataset"].value_counts()
    by_size = replace(PROFILE, data=config.Data(image_size=48))
    assert study.claims.large(by_size) == tuple(sizes.index[:2])


@pytest.mark.parametrize("name", ["photos-8", "photos-8-balanced", "photos-8-reversed"])
def test_the_large_datasets_of_photos_8_are_those_of_the_protocol(name):
    profile = config.profile(name)
    split = pd.read_csv(paths.ROOT / profile.data.split)
    of_train = split[split["split"] == "train"]
    sizes = of_train["path"].str.split("/").str[0].value_counts()
    assert set(profile.large) == {"cars_196", "groceries", "birds_cub50", "flowers_17"}
    assert len(sizes) == 8
    if name == "photos-8":
        assert set(sizes.index[:4]) == set(profile.large)
    if name == "photos-8-reversed":
        assert not set(sizes.index[:2]) & set(profile.large)


def test_a_headline_of_smoke_says_that_it_means_nothing(results):
    told = results.headline(replace(PROFILE, name="smoke")).data
    assert told.startswith(kept_results.MEANS_NOTHING)
    assert kept_results.MEANS_NOTHING not in results.headline(PROFILE).data


def test_a_headline_has_the_best_row_and_pairs(results):
    told = results.headline(PROFILE, pairs=[("PUMA", "Linear")]).data
    harmonic = results.wide()["harmonic"]
    best = figures.shown(harmonic.idxmax())
    assert f"{best} {100 * harmonic.max():.1f} [" in told.split(";")[0]
    gain = results.difference("PUMA", "Linear").at["harmonic", "value"]
    assert f"PUMA over Linear {100 * gain:+.1f} [" in told


@pytest.mark.parametrize(("other", "beside"), [("b", False), ("cars", True)])
def test_a_name_alone_makes_no_dataset_of_the_paper(other, beside, results):
    names = {"photos": "cub", "aircraft": other}
    renamed = replace(results, tidy=results.tidy.replace({"dataset": names}))
    shown = renamed.with_paper_values(PRINTED)["cub"].astype(str)
    assert shown.str.contains("paper").all() == beside


FOUR_EPOCHS = replace(
    ONE,
    name="two",
    training=config.Training(epochs=4, batch_size=60, checkpoint_seconds=1e-3, device="cpu"),
)


def train_four_epochs(results, said):
    """In a process of its own: train a run, and write what it tells to the file `said`."""
    paths.RESULTS = results
    with said.open("w") as stream, contextlib.redirect_stderr(stream):
        study.run_all({"x": FOUR_EPOCHS.run("linear")}, FOUR_EPOCHS)


def test_two_processes_train_a_run_once_and_one_that_is_killed_goes_on(tmp_path):
    def start(number):
        context = multiprocessing.get_context("forkserver")
        given = (tmp_path, tmp_path / f"{number}.txt")
        process = context.Process(target=train_four_epochs, args=given)
        process.start()
        return process

    first = start(0)
    deadline = time.monotonic() + 200
    while not (logs := list(tmp_path.glob("two/runs/*/log.csv"))):
        assert first.is_alive() and time.monotonic() < deadline, (
            "it ended before it could be killed"
        )
        time.sleep(0.01)
    first.kill()
    first.join()
    log = logs[0].read_text()  # with seconds, which no second training would repeat
    both = [start(number) for number in (1, 2)]
    for process in both:
        process.join(300)
    said = [(tmp_path / f"{number}.txt").read_text() for number in (1, 2)]
    assert [process.exitcode for process in both] == [0, 0], said
    assert logs[0].read_text().startswith(log) and len(logs[0].read_text().splitlines()) == 5
    assert sum("epoch" in text for text in said) <= 1 and any("run 1 of 1" in text for text in said)
    (line,) = (tmp_path / "two" / "kept-1.jsonl").read_text().splitlines()
    assert len(json.loads(line)["log"]) == 4


def test_specific_models_search_their_own_dataset_and_others_all(results, members):
    names = {"PUMA": results.names["PUMA"][0], "specific": members}
    vectors, images = study.embeddings(names["PUMA"], "test")
    query = int(np.flatnonzero(images["dataset"] == "aircraft")[3])
    found = analysis.nearest(names, "test", PROFILE.data, [3, query], k=5)
    expected = evaluation.neighbours(vectors, images, [3, query], 5, within_dataset=False)
    np.testing.assert_array_equal(found["PUMA"], expected)
    own, _ = study.embeddings(members["aircraft"], "test", PROFILE.data)
    expected = evaluation.neighbours(own, images, [query], 5)
    np.testing.assert_array_equal(found["specific"][1:], expected)


@pytest.fixture
def drawn(monkeypatch):
    """Random embeddings in place of those of models, different for each run."""

    def embeddings(name, profile, union, train=False):
        images = data.load(union).test.reset_index(drop=True)
        rng = np.random.default_rng(list(name.encode()))
        return rng.standard_normal((len(images), 8), np.float32), images

    monkeypatch.setattr(analysis, "embeddings", embeddings)
    return embeddings


def test_another_union_has_other_neighbours(results, drawn):
    name = results.names["PUMA"][0]
    turned = replace(PROFILE.data, datasets=("aircraft", "photos"))
    alone = replace(PROFILE.data, datasets=("photos",))
    for union in (PROFILE.data, turned, alone):
        found = analysis.nearest({"PUMA": name}, "test", union, [3], k=5)["PUMA"]
        expected = evaluation.neighbours(*drawn(name, "test", union), [3], 5, within_dataset=False)
        np.testing.assert_array_equal(found, expected)


def test_models_that_exchange_their_datasets_have_other_neighbours(results, members, drawn):
    one, other = members.values()
    given = {"photos": one, "aircraft": other}
    exchanged = {"aircraft": one, "photos": other}
    for models_of in (given, exchanged):
        found = analysis.nearest({"model": models_of}, "test", PROFILE.data, [3])["model"]
        vectors, images = drawn(models_of["photos"], "test", PROFILE.data)
        assert images["dataset"].iloc[3] == "photos"
        np.testing.assert_array_equal(found, evaluation.neighbours(vectors, images, [3], 7))
