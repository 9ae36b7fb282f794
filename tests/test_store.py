"""Kept lines: whole or damaged, written by several at once; and names that are no paths."""

import json
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import kept_runs
import pytest
from kept_runs import (
    RUNS,
    add,
    add_failed,
    add_text,
    another,
    any_name,
    finish,
    kept_file,
    line_of,
    texts,
    trained,
)

import puma_study as study
from puma_study import analysis, runs, store
from puma_study.record import FailedRun, FinishedRun
from pumalib import paths
from pumalib.training import run_folder

ELSEWHERE = [
    "..",
    ".",
    "",
    "/tmp/x",
    "../x",
    "a/b",
    "a\\b",
    ".hidden",
    "a b",
    "ä",
    "a\n",
    "a" * 300,
    7,
]


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Three kept runs by what they are, without folders."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    any_name(monkeypatch)
    return kept_runs.keep_three()


def damaged():
    return [line for line in store.lines("test") if line.record is None]


def test_lines_are_sorted_whole_and_of_eight_digits(names):
    assert [json.loads(line)["name"] for line in texts()] == sorted(names.values())
    record = store.read("test")[names["puma"]]
    assert record.seconds == 0.33333333
    assert record.log == []
    assert study.run_of(names["puma"], "test") == RUNS["puma"]
    hits = store.record(names["puma"], "test").hits()["unified"]
    assert hits.mean() == pytest.approx(record.accuracy("unified"), abs=1e-7)


def test_a_full_file_is_followed_by_another(names, monkeypatch):
    monkeypatch.setattr(store, "FULL", 3)
    add(another())
    assert [len(texts(number)) for number in (1, 2)] == [3, 1]
    kept_file().write_text(kept_file().read_text() + kept_file(2).read_text())  # as after a merge
    store.drop("another", "test")
    assert store.read("test").keys() == set(names.values())
    assert not kept_file(2).exists()


def test_a_file_of_long_lines_is_full_by_its_bytes(names, monkeypatch):
    monkeypatch.setattr(store, "FULL_BYTES", kept_file().stat().st_size)
    add(another())
    assert [len(texts(number)) for number in (1, 2)] == [3, 1]


@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
def test_a_name_that_leads_elsewhere_is_none(name, names):
    for use in (store.place, store.folder):
        with pytest.raises(ValueError, match="cannot be the name of a run"):
            use(name, "test")
    with pytest.raises(ValueError, match="cannot be the name of a run"):
        add(another(name))
    with pytest.raises(ValueError, match="cannot be the name of a run"):
        store.put(name, "{}", "test")
    with pytest.raises(ValueError, match="cannot be the name of a run"):
        analysis.cached_table("title", "test", dict, [name])
    with pytest.raises(ValueError, match="cannot be the name of a run"):
        analysis.cached_table(name, "test", dict)


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
def test_a_line_of_such_a_name_is_damaged_whatever_its_digest(name, names):
    add_text(line_of(another(name)))
    assert store.read("test").keys() == set(names.values())
    (line,) = damaged()
    assert "cannot be the name of a run" in line.problem


def test_every_name_of_a_method_and_loss_is_one():
    for name in ("vpt+adapter-proxynca++-1a2b3c4d", "puma-ms-ensemble-1a2b3c4d", "lora_2.5-x-0"):
        assert store.place(name, "test").name == name


def test_a_folder_that_is_a_link_is_not_followed(names, tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    link = store.place(names["puma"], "test")
    link.parent.mkdir()
    link.symlink_to(target)
    with pytest.raises(ValueError, match=r"is a link to .*elsewhere; .*runs remove"):
        store.folder(names["puma"], "test")
    with pytest.raises(ValueError, match="is a link to"), store.held(link):
        pass
    assert not list(target.iterdir())


@pytest.mark.parametrize("linked", ["test/runs", "test"])
def test_no_folder_of_runs_leads_elsewhere(linked, names, tmp_path):
    target = tmp_path / "disk"
    shutil.rmtree(tmp_path / linked, ignore_errors=True)
    (target / "runs" / names["puma"]).mkdir(parents=True)
    (target / names["puma"]).mkdir()
    (tmp_path / linked).symlink_to(target)
    for use in (store.place, store.folder, runs.remove):
        with pytest.raises(
            ValueError, match=r"is a link, or below one, to .*disk.*PUMALIB_RESULTS"
        ):
            use(names["puma"], "test")
    if linked == "test":
        for write in (
            lambda: store.drop("damaged-1a2b3c4d", "test"),
            lambda: store.put(names["puma"], "{}", "test"),
        ):
            with pytest.raises(ValueError, match="is a link, or below one"):
                write()
        assert not list(target.glob("*.lock")) and not list(target.glob("*.jsonl"))
    assert (target / names["puma"]).is_dir() and (target / "runs" / names["puma"]).is_dir()


def test_a_lock_that_is_a_link_empties_nothing(names, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    lock = tmp_path / "test" / ".kept.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(precious)
    with pytest.raises(OSError):
        store.drop(names["puma"], "test")
    assert precious.read_text() == "kept"


def changed_rows(changes, *datasets):
    """The table of another run with some cells changed, or taken out where they are None."""
    table = []
    for row in another()["table"]:
        if not datasets or row["dataset"] in datasets:
            row = {key: value for key, value in {**row, **changes}.items() if value is not None}
        table.append(row)
    return {"table": table}


def without(dataset):
    """The numbers of another run without those of a dataset, or of all."""
    whole = another()
    parts = {"table": [row for row in whole["table"] if row["dataset"] != dataset]}
    for part in ("hits", "classes"):
        parts[part] = {name: bits for name, bits in whole[part].items() if name != dataset}
    return parts


ROWS = another()["table"]
CONTENTS = {
    "a dataset less": without("digits"),
    "no row of all queries": without("unified"),
    "no harmonic mean": without("harmonic"),
    "hits of none": {"hits": {}, "classes": {}, **changed_rows({"R@1": 0.99})},
    "classes of none": {"classes": {}},
    "a table without rows": {"table": [], "hits": {}, "classes": {}},
    "a row twice": {"table": [*ROWS, ROWS[0]]},
    "a row twice, another number": {"table": [{**ROWS[0], "R@1": 0.1}, *ROWS]},
    "10^400 queries": changed_rows({"queries": 10**400}, "harmonic"),
    "10^400 seconds": {"seconds": 10**400},
    "1e400 seconds": {"seconds": float("inf")},
    "10^400 parameters": {"parameters": {"trainable": 1, "total": 10**400}},
    "no table": {"table": None},
    "a table of numbers": {"table": [1, 2]},
    "a row without dataset": {"table": [{"R@1": 1.0, "queries": 2}]},
    "a row of words": {"table": [{"dataset": "x", "queries": 2, "R@1": "0.9"}]},
    "hits of no row": {"hits": {"other": "gA=="}},
    "no parameters": {"parameters": None},
    "no device": {"environment": {}},
    "a device that clears the screen": {"environment": {"device": "cpu\x1b[2J"}},
    "a row without R@1": changed_rows({"R@1": None}),
    "R@1 that is not that of the hits": changed_rows({"R@1": 0.99}),
    "R@1 that is none": changed_rows({"R@1": float("nan")}),
    "accuracies above 1": changed_rows({"MAP@R": 7}),
    "more queries than hits": changed_rows({"queries": 10**14}),
    "fewer queries than none": changed_rows({"queries": -8}),
    "half a query": changed_rows({"queries": 8.5}),
    "true queries": changed_rows({"queries": True}),
    "a harmonic mean of its own": changed_rows({"R@1": 0.9}, "harmonic"),
    "hits of fewer queries": {"hits": {"digits": "gA=="}},
    "hits that are no code": {"hits": {"digits": 8 * "!"}},
    "settings in a list": {"run": []},
    "a nest of settings": {"run": {"seed": 0, "data": json.loads("[" * 50 + "]" * 50)}},
    "an ensemble of none": {"members": []},
    "an ensemble of folders": {"members": ["../x"]},
}


@pytest.mark.parametrize("changes", CONTENTS.values(), ids=CONTENTS)
def test_a_whole_line_of_another_shape_is_damaged_and_named(changes, names):
    add_text(line_of(another(**changes)))
    number = len(names) + 1
    with pytest.warns(
        UserWarning, match=rf"kept-1.jsonl, line {number} \(damaged-\w{{8}}\) is damaged"
    ):
        assert store.read("test").keys() == set(names.values())
    with pytest.raises(ValueError, match=r"its|an ensemble"):
        add(another("yet-another", **changes))
    assert study.list_runs("test").index.tolist() == sorted(names.values())


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize(
    "text",
    [
        "one\x85line\u2028all the same",
        "[" * 10**5,
        '{"name":' * 10**5,
        "7",
        "null",
        "<<<<<<< ours",
        "[]",
        '"x"',
    ],
)
def test_any_text_is_at_worst_a_damaged_line(text, names):
    add_text(text, "")
    assert len(study.list_runs("test")) == 3
    (line,) = damaged()
    assert store.DAMAGED.fullmatch(line.name)
    store.drop(line.name, "test")
    assert len(texts()) == 3


def test_an_empty_file_is_named_and_the_next_run_takes_its_place(names):
    kept_file().write_text("")
    with pytest.warns(UserWarning, match=r"kept-1.jsonl, line 1 .* is damaged \(the file is empty"):
        assert store.read("test") == {}
    (line,) = damaged()
    store.drop(line.name, "test")
    assert not kept_file().exists()
    kept_file().write_text("")
    with pytest.warns(UserWarning, match="is damaged"):
        add(another())
    assert len(texts()) == 1 and store.read("test").keys() == {"another"}


@pytest.fixture
def own_names(tmp_path, monkeypatch):
    """As `names`, where a run's name must follow from what it is."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return kept_runs.keep_three()


def test_the_record_of_another_run_is_none_of_a_name(own_names):
    linear, puma = own_names["linear"], own_names["puma"]
    whole = store.record(linear, "test").content()
    forged = [
        store.record(puma, "test").content() | {"name": linear},
        # Of the same method and loss.
        store.record(own_names["again"], "test").content() | {"name": linear},
        whole | {"run": whole["run"] | {"dim": 17}},
        whole | {"environment": {"device": "cpu", "data": "0" * 64}},
        whole | {"environment": {"device": "cpu"}},
        {**whole, "run": None, "members": [puma]},
        whole | {"members": [puma]},
    ]
    for content in forged:
        kept_file().write_text(line_of(content) + "\n")
        with pytest.warns(
            UserWarning, match="by its settings it would be called|has no 'data'|'members'"
        ):
            assert store.read("test") == {}
    kept_file().write_text(line_of(whole) + "\n")
    assert store.read("test").keys() == {linear}


def test_of_weights_in_a_file_the_method_and_loss_of_a_name_are_checked(own_names):
    """Another machine has other weights at the same place, and reads the line all the same."""
    content = store.record(own_names["linear"], "test").content()
    content["run"]["pretrained"] = "data/raw/gone.safetensors"
    assert FinishedRun.of(content).name == own_names["linear"]
    with pytest.raises(ValueError, match="would be called linear-"):
        FinishedRun.of(content | {"name": own_names["puma"]})


def test_a_record_of_other_settings_is_not_taken_for_a_row(own_names, monkeypatch):
    any_name(monkeypatch)
    other = store.record(own_names["puma"], "test").content() | {"name": own_names["linear"]}
    kept_file().write_text(line_of(other) + "\n")
    with pytest.raises(ValueError, match=r"has the settings of another run: .*runs remove linear"):
        study.run_all({"row": RUNS["linear"]}, replace(kept_runs.PROFILE, seeds=(0,)))


@pytest.mark.parametrize("content", ["", "\0\0\0", '{"run": '])
def test_a_damaged_record_in_a_folder_is_removed_and_the_run_goes_on(content, own_names):
    folder = trained(RUNS["puma"], seed=1, rate=0.6)
    (folder / run_folder.FINISHED).write_text(content)
    with (
        pytest.warns(UserWarning, match=r"metrics.json is damaged .*removed, and the run goes on"),
        store.held(folder),
    ):
        assert not (folder / run_folder.FINISHED).exists()
        trained(RUNS["puma"], seed=1, rate=0.6)
    assert store.record(folder.name, "test").agrees(store.record_in(folder))


def pipe(file):
    os.mkfifo(file)


def lost_link(file):
    file.symlink_to(file.parent / "gone")


@pytest.mark.parametrize("make", [pipe, lost_link, Path.mkdir])
def test_what_is_called_like_a_kept_file_and_is_none_is_named(make, names):
    make(kept_file(7))
    with pytest.raises(ValueError, match=r"kept-7\.jsonl is no file of kept runs: move it"):
        store.read("test")


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_a_run_that_is_trained_again_replaces_its_damaged_line(names):
    line = texts()[1]
    name = json.loads(line)["name"]
    record = store.record(name, "test")
    kept_file().write_text(kept_file().read_text().replace(line, line[:-9] + line[-8:]))
    assert name not in store.read("test")
    assert [found.begins for found in damaged()] == [name]
    store.add(record, "test")
    assert texts()[1] == line
    assert len(texts()) == 3


def test_two_lines_with_different_numbers_are_told_and_both_stay(names):
    one = store.record(names["puma"], "test")
    add_text(line_of(one.content() | kept_runs.numbers(5, 0.2)))
    with pytest.warns(
        UserWarning, match=r"different numbers \(kept-1.jsonl, line 3; kept-1.jsonl, line 4\)"
    ):
        assert store.read("test")[names["puma"]] == one
    add(another())  # writes the file anew
    assert set(store.conflicts(store.lines("test"))) == {names["puma"]}
    assert len(texts()) == 5


def test_the_same_line_twice_is_no_conflict(names):
    add_text(texts()[0])
    with warnings.catch_warnings(action="error"):
        assert len(store.read("test")) == 3


def test_a_finished_folder_whose_numbers_contradict_its_hits_is_not_kept(names):
    folder = trained(RUNS["puma"], seed=1, rate=0.6)
    file = folder / run_folder.FINISHED
    record = json.loads(file.read_text())
    record["table"][0]["R@1"] = 0.99
    file.write_text(json.dumps(record))
    store.drop(names["puma"], "test")
    with pytest.raises(ValueError, match=r"metrics\.json is damaged .*by its hits.*trained again"):
        finish(folder)
    assert names["puma"] not in store.read("test")


def test_a_repeated_training_is_kept_beside_once(names):
    trained(RUNS["puma"], seed=1, rate=0.6)  # as it was kept
    folder = store.folder(names["puma"], "test")
    finish(folder)
    assert store.record(folder.name, "test").agrees(store.record_in(folder))
    assert store.lines("test", store.REPEATED) == []

    trained(RUNS["puma"], seed=7, rate=0.2)
    finish(folder)
    finish(folder)
    again = store.record_in(folder)
    assert not store.record(names["puma"], "test").agrees(again)
    (line,) = store.lines("test", store.REPEATED)
    assert (line.file.name, line.name, line.record) == ("repeated.jsonl", names["puma"], again)
    assert line.text == line_of(again.content())
    assert len(texts()) == 3, "what is kept stays"


# ---- Runs that failed


def failed(name="linear-failed", **changes):
    """The content of the record of a run that failed, as `add_failed` takes it."""
    return {
        "name": name,
        "run": another()["run"],
        "environment": {"device": "cpu"},
        "where": "epoch 3, batch 7",
        "what": "the loss is nan",
        **changes,
    }


def test_a_failed_run_is_kept_apart_and_has_no_numbers(names):
    add_failed(failed())
    assert store.failures("test") == {"linear-failed": FailedRun.of(failed())}
    assert store.read("test").keys() == set(names.values())
    assert len(texts()) == 3
    for use in (store.record, store.classes):
        message = (
            r"linear-failed \(epoch 3, batch 7: the loss is nan\).*runs remove linear-failed --yes"
        )
        with pytest.raises(store.Failed, match=message):
            use("linear-failed", "test")
    with pytest.raises(store.Failed, match="linear-failed"):
        study.collect({"row": [names["linear"], "linear-failed"]}, "test")


def test_a_later_failure_takes_the_place_of_an_earlier_one_and_drop_takes_it_out(names):
    add_failed(failed("b"))
    add_failed(failed("a"))
    add_failed(failed("b", where="evaluation"))
    lines = (paths.RESULTS / "test" / store.FAILED).read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a", "b"]
    assert store.failures("test")["b"].where == "evaluation"
    store.drop("b", "test")
    assert store.failures("test").keys() == {"a"}


def test_a_kept_run_has_its_numbers_whatever_failed_elsewhere(names):
    add_failed(failed(names["puma"]))
    assert store.failures("test") == {}
    assert store.record(names["puma"], "test").hits()["unified"].size


@pytest.mark.parametrize(
    "changes",
    [{"where": None}, {"what": 7}, {"table": []}, {"name": "../x"}, {"run": None}],
    ids=str,
)
def test_what_is_no_failure_is_refused_and_damaged(changes, names):
    content = failed(**changes)
    with pytest.raises(ValueError):
        FailedRun.of(content)
    (paths.RESULTS / "test" / store.FAILED).write_text(f"{line_of(content)}\n")
    with pytest.warns(UserWarning, match=r"failed.jsonl, line 1 \(damaged-\w{8}\) is damaged"):
        assert store.failures("test") == {}
    # Nor is the line of a finished run one of a failure, or the other way round.
    with pytest.raises(ValueError, match="its 'parameters': Field required"):
        FinishedRun.of(failed())
