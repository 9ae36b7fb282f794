"""`python -m puma_study runs`: kept runs listed, compared, verified and removed."""

import json

import kept_runs
import pandas as pd
import pytest
from filelock import FileLock
from kept_runs import (
    RUNS,
    add,
    add_failed,
    add_text,
    another,
    any_name,
    kept_file,
    line_of,
    texts,
    trained,
)

import puma_study as study
from puma_study import contrasts, runs, store
from puma_study.__main__ import main
from puma_study.record import FinishedRun
from pumalib import paths
from pumalib.__main__ import main as library_main
from pumalib.training import run_folder


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Three kept runs by what they are, without folders."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    any_name(monkeypatch)
    return kept_runs.keep_three()


def call(capsys, *argv):
    status = main(["runs", *argv])
    return status, *capsys.readouterr()


def test_list_filters_by_any_setting(names, capsys):
    table = study.list_runs("test")
    assert table.loc[names["again"], ["method", "seed", "epochs"]].tolist() == ["linear", 1, 3]
    assert table.loc[names["puma"], "data.image_size"] == 48
    r1 = store.record(names["puma"], "test").accuracy("unified")
    assert table.loc[names["puma"], "unified"] == pytest.approx(100 * r1)
    status, out, _ = call(capsys, "list", "--query", "method == 'linear' and `training.lr` < 1")
    assert status == 0
    assert [names[key] in out for key in ("linear", "again", "puma")] == [True, True, False]
    status, _, err = call(capsys, "list", "--query", "metod == 'linear'")
    assert status == 2
    assert "metod" in err and "method" in err
    assert call(capsys, "list", "--profile", "none")[1] == "no runs\n"
    assert call(capsys, "list", "--profile", "/tmp")[1] == "no runs\n"


def test_verify_of_a_mistyped_profile_is_not_no_problem(names, capsys):
    status, out, err = call(capsys, "verify", "--profile", "tset")
    assert status == 2
    assert "no problem" not in out
    assert "nothing is kept of a profile 'tset'; there are: test" in err


@pytest.fixture
def failed(names):
    """One more run, that failed."""
    run = kept_runs.PROFILE.run("mlp3")
    name = run_folder.run_name(run)
    content = {
        "name": name,
        "run": json.loads(run.to_json()),
        "environment": {"device": "cpu"},
        "where": "epoch 2, batch 5",
        "what": "the loss is nan",
    }
    return add_failed(content)


def test_list_tells_those_that_failed_by_themselves(failed, names, capsys):
    status, out, _ = call(capsys, "list")
    finished, _, without_numbers = out.partition("failed:")
    assert status == 0
    assert failed not in finished and all(name in finished for name in names.values())
    assert failed in without_numbers and "epoch 2, batch 5  the loss is nan" in without_numbers
    assert failed not in study.list_runs("test").index
    out = call(capsys, "list", "--query", "unified > 0")[1]
    assert failed not in out and "failed:" not in out
    out = call(capsys, "list", "--query", "method == 'mlp3'")[1]
    assert failed in out and not any(name in out for name in names.values())
    assert call(capsys, "list", "--query", "metod == 'mlp3'")[0] == 2


def test_verify_knows_those_that_failed(failed, names, capsys):
    assert call(capsys, "verify") == (0, "no problem\n", "")
    file = paths.RESULTS / "test" / store.FAILED
    whole = file.read_text()
    record = store.failures("test")[failed].content()
    file.write_text(line_of(record | {"run": record["run"] | {"dim": 17}}) + "\n")
    status, out, _ = call(capsys, "verify")
    assert status == 1 and f"test/{failed}: failed; outdated:" in out
    file.write_text(line_of(record | {"name": names["puma"]}) + "\n")
    status, out, _ = call(capsys, "verify")
    assert status == 1
    assert f"test/{names['puma']}: kept, and failed elsewhere; delete failed.jsonl, line 1" in out
    file.write_text(whole.replace("nan", "inf"))
    with pytest.warns(UserWarning, match="is damaged"):
        status, out, _ = call(capsys, "verify")
    assert status == 1 and "damaged line (failed.jsonl, line 1: its digest is another)" in out


def test_remove_lets_one_that_failed_be_tried_again(failed, names, capsys):
    run_folder.make(folder := store.folder(failed, "test"))
    assert "would remove (add --yes)" in call(capsys, "remove", failed)[1]
    assert store.failures("test").keys() == {failed}
    assert call(capsys, "remove", failed, "--yes")[0] == 0
    assert store.failures("test") == {} and not folder.exists()
    assert call(capsys, "compare", names["linear"], failed)[0] == 2


def test_compare_says_that_a_run_failed(failed, names, capsys):
    status, _, err = call(capsys, "compare", names["linear"], failed)
    assert status == 1
    assert f"{failed} (epoch 2, batch 5: the loss is nan)" in err


def test_the_open_loss_is_a_column_where_it_was_kept(names):
    add(another(open_loss=1.25))
    add(another("untrained", open_loss=None))
    column = study.list_runs("test")["open_loss"]
    assert column["another"] == 1.25
    assert column.drop("another").isna().all()


def test_settings_cannot_pass_for_a_name(names):
    record = another()
    add(record | {"run": record["run"] | {"name": "puma-best", "device": "tpu"}})
    line = study.list_runs("test").loc["another"]
    assert line["device"] == "cpu"


def test_compare_gives_settings_and_the_paired_difference(names, capsys):
    settings, table = runs.compare(names["linear"], f"test/{names['again']}")
    assert settings.T.to_dict("list") == {"seed": [0, 1]}
    first, second = (
        store.record(names[key], "test").hits()["unified"].mean() for key in ("linear", "again")
    )
    assert table.at["unified", "value"] == pytest.approx(100 * (second - first))
    assert table.at["unified", "high"] < 0
    assert call(capsys, "compare", names["linear"], names["puma"])[0] == 0
    status, _, err = call(capsys, "compare", names["linear"], "pum")
    assert status == 2
    assert "no run is called 'pum'" in err


def test_compare_refuses_what_is_not_kept(names, capsys):
    unfinished = trained(kept_runs.PROFILE.run("mlp3"))
    status, _, err = call(capsys, "compare", unfinished.name, names["puma"])
    assert status == 2
    assert f"no run '{unfinished.name}' is kept" in err


def keep_by_seeds(row, seeds):
    """Keep runs of a row, seed by seed; their names."""
    kept = []
    for seed in seeds:
        record = another(f"{row}-{seed}", **kept_runs.numbers(seed, 0.5))
        record["run"]["seed"] = seed
        kept.append(add(record))
    return kept


def test_rows_of_unlike_seeds_are_compared_by_their_means(names):
    ours = keep_by_seeds("ours", [0, 1, 2])
    theirs = keep_by_seeds("theirs", [2, 3])
    gains = contrasts.difference(ours, theirs, "test")
    means = []
    for row in (ours, theirs):
        of_seeds = [store.record(name, "test").accuracies for name in row]
        means.append(pd.DataFrame(of_seeds).mean())
    expected = (means[0] - means[1])[gains.index]
    assert gains["value"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert (gains["seeds"] == 2).all()
    assert (gains["p_greater"] > 0).all()


def test_a_row_of_one_seed_is_compared_by_that_seed_alone(names):
    ours = keep_by_seeds("ours", [0, 1, 2])
    gains = contrasts.difference(ours, keep_by_seeds("theirs", [2]), "test")
    # One seed draws the same hits.
    assert (gains["value"] == 0).all()
    assert gains["p_greater"].isna().all()


def test_rows_without_a_common_seed_are_not_testable_if_one_has_a_single_seed(names):
    ours = keep_by_seeds("ours", [0, 1])
    with pytest.raises(contrasts.NotTestable, match=r"seeds 0, 1.*seeds 2.*no seed in common"):
        contrasts.difference(ours, keep_by_seeds("theirs", [2]), "test")
    with pytest.raises(
        contrasts.NotTestable, match="ours-0 and ours-0 are of one row and have one seed, 0"
    ):
        contrasts.difference([ours[0], ours[0]], ours, "test")


def test_an_ensemble_has_the_seed_of_its_members(names):
    ours = keep_by_seeds("ours", [0, 3])
    ensemble = another("both", **kept_runs.numbers(3, 0.5), members=[ours[1], names["puma"]])
    del ensemble["run"]
    add(ensemble)
    gains = contrasts.difference(["both"], ours, "test")
    assert (gains["value"] == 0).all()


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_verify_finds_what_is_wrong_and_goes_on(names, capsys):
    assert call(capsys, "verify") == (0, "no problem\n", "")
    changed = store.record(names["linear"], "test").content()
    call(capsys, "remove", names["linear"], "--yes")
    add(changed | {"run": changed["run"] | {"dim": 17}})
    (line,) = (line.text for line in store.lines("test") if line.name == names["again"])
    one_digit = line.replace('"R@8": 0.', '"R@8": 1.', 1)
    kept_file().write_text(kept_file().read_text().replace(line, one_digit))
    run_folder.make(folder := store.folder(names["puma"], "test"))
    (folder / store.MODEL).write_bytes(b"no model")
    status, out, _ = call(capsys, "verify")
    assert status == 1
    assert "damaged line (kept-1.jsonl, line " in out
    assert f"it begins as '{names['again']}'" in out
    assert "SafetensorError" in out
    assert f"{names['linear']}: outdated:" in out


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_damaged_lines_are_removed_each_by_its_own_name(names, capsys):
    whole = texts()
    kept_file().write_text(
        "\n".join(["<<<<<<< ours", *whole[:2], "=======", *whole[2:], ">>>>>>> theirs", ""])
    )
    add(another())
    assert len(texts()) == 7, "what is damaged stays when others are written"
    said = call(capsys, "verify")[1]
    called = [line.split(": ")[0] for line in said.splitlines() if "damaged line" in line]
    assert len(set(called)) == 3
    status, out, _ = call(capsys, "remove", *called, "--yes")
    assert (status, out.count("removed")) == (0, 3)
    assert sorted(store.read("test")) == sorted([*names.values(), "another"])
    assert len(texts()) == 4


def test_verify_names_both_of_two_lines_with_different_numbers(names, capsys):
    add_text(line_of(store.record(names["puma"], "test").content() | kept_runs.numbers(5, 0.2)))
    with pytest.warns(UserWarning, match="different numbers"):
        status, out, _ = call(capsys, "verify")
    assert status == 1
    assert (
        f"test/{names['puma']}: different numbers in kept-1.jsonl, line 3 and kept-1.jsonl, line 4"
        in out
    )
    assert call(capsys, "remove", names["puma"], "--yes")[0] == 0
    assert len(texts()) == 2


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_verify_checks_the_digests_of_repeated_lines(names, capsys):
    again = store.record(names["puma"], "test").content() | kept_runs.numbers(5, 0.2)
    store.add_repeat(FinishedRun.rounded(again), "test")
    assert call(capsys, "verify")[:2] == (0, "no problem\n")
    file = paths.RESULTS / "test" / store.REPEATED
    file.write_text(file.read_text().replace('"R@8": 0.', '"R@8": 1.', 1))
    status, out, _ = call(capsys, "verify")
    assert status == 1
    assert "damaged line (repeated.jsonl, line 1: its digest is another)" in out
    assert call(capsys, "remove", out.split(": ")[0], "--yes")[0] == 0
    assert call(capsys, "verify")[:2] == (0, "no problem\n")


def test_remove_says_first_and_leaves_what_a_process_holds(names, capsys):
    folder = trained(RUNS["puma"], 1, 0.5)
    assert "would remove (add --yes) test/" in call(capsys, "remove", names["puma"])[1]
    assert folder.is_dir()
    with FileLock(folder / ".lock"):
        assert "a running process holds it" in call(capsys, "remove", names["puma"], "--yes")[1]
    assert names["puma"] in store.read("test")
    status, _, _ = call(capsys, "remove", names["puma"], names["linear"], "--yes")
    assert status == 0
    assert not folder.exists()
    assert set(store.read("test")) == {names["again"]}
    assert call(capsys, "remove", names["puma"], "--yes")[0] == 2


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("name", ["..", "../..", "absolute"])
def test_nothing_outside_is_removed_by_a_hostile_line(name, names, capsys, tmp_path):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").touch()
    if name == "absolute":
        name = str(outside)
    add_text(f'{{"name": "{name}", "digest": "x"}}', line_of(another(name)))
    for label in (name, f"test/{name}"):
        assert call(capsys, "remove", label, "--yes")[0] == 2
    with pytest.raises(ValueError, match="cannot be the name of a run"):
        runs.remove(name, "test")
    said = call(capsys, "verify")[1]
    called = [line.split(": ")[0] for line in said.splitlines()]
    assert len(called) == 2
    assert call(capsys, "remove", *called, "--yes")[0] == 0
    assert (outside / "file").is_file()
    assert store.read("test").keys() == set(names.values())


def test_of_a_linked_folder_the_link_is_removed(names, capsys, tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "metrics.json").touch()
    link = store.place(names["puma"], "test")
    link.parent.mkdir()
    link.symlink_to(target)
    assert "is a link to" in call(capsys, "verify")[1]
    assert call(capsys, "remove", names["puma"], "--yes")[0] == 0
    assert not link.is_symlink()
    assert (target / "metrics.json").is_file()
    assert names["puma"] not in store.read("test")


def test_errors_are_one_line_and_unknown_commands_usage(capsys):
    assert library_main(["data", "download", "cubb"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown dataset 'cubb'; known: ")
    assert main(["dance"]) == 2
    assert main(["runs", "remove"]) == 2
    assert "Traceback" not in capsys.readouterr().err
