"""The record of a run: what it says, and the line that it is read from and written to."""

import json

import kept_runs
import numpy as np
import pytest

from puma_study.record import FailedRun, FinishedRun
from pumalib import evaluation, paths

KEPT = sorted((paths.ROOT / "results").glob("*/kept-*.jsonl"))
KEPT += sorted((paths.ROOT / "results").glob("*/repeated.jsonl"))


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_kept_line_is_read_and_written_byte_for_byte(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [FinishedRun.read(line).line() for line in lines] == lines


def test_the_line_of_a_failed_run_is_read_and_written_byte_for_byte():
    content = {
        "name": "linear-proxynca-1a2b3c4d",
        "run": {"seed": 0, "data": {"flip": False}},
        "environment": {"python": "3.11", "device": "cpu", "threads": 2},
        "where": "epoch 3, batch 7",
        "what": "the loss is nan",
    }
    line = kept_runs.line_of(content)
    failed = FailedRun.read(line)
    assert failed.line() == line
    assert failed.summary == "linear-proxynca-1a2b3c4d (epoch 3, batch 7: the loss is nan)"


@pytest.fixture
def content(monkeypatch):
    """A run of two datasets: by hand 1 of 2 and 3 of 4 queries hit, of two classes each."""
    kept_runs.any_name(monkeypatch)
    hits = {"a": [1, 0], "b": [1, 1, 0, 1], "unified": [1, 0, 0, 1, 0, 1]}
    first = {"a": [1, 1], "b": [1, 0, 1, 0], "unified": [1, 1, 1, 0, 1, 0]}
    accuracies = {"a": 0.5, "b": 0.75, "unified": 0.5, "harmonic": 0.6}
    table = []
    for name, accuracy in accuracies.items():
        queries = len(hits.get(name, hits["unified"]))
        table.append({"dataset": name, "R@1": accuracy, "R@2": 1.0, "queries": queries})
    return {
        "name": "any",
        "run": json.loads(kept_runs.RUNS["linear"].to_json()),
        "environment": {"device": "cpu"},
        "parameters": {"trainable": 1, "total": 2},
        "seconds": 1,
        "images_per_second": None,
        "table": table,
        "hits": {name: evaluation.pack(np.array(bits)) for name, bits in hits.items()},
        "classes": {name: evaluation.pack(np.array(bits)) for name, bits in first.items()},
    }


def test_a_record_says_accuracies_hits_and_classes(content):
    record = FinishedRun.of(content)
    assert record.accuracies == {"a": 0.5, "b": 0.75, "unified": 0.5, "harmonic": 0.6}
    assert record.accuracy("harmonic") == 0.6
    assert record.queries == {"a": 2, "b": 4, "unified": 6, "harmonic": 6}
    assert record.scores().loc["b"].to_dict() == {"R@1": 0.75, "R@2": 1.0, "queries": 4}
    assert record.hits()["unified"].tolist() == [1, 0, 0, 1, 0, 1]
    assert record.classes()["b"].tolist() == [1, 1, 2, 2]
    assert record.settings == kept_runs.RUNS["linear"]


def test_a_record_is_written_as_its_content_came(content):
    backwards = dict(reversed(content.items()))
    assert json.dumps(FinishedRun.of(backwards).content()) == json.dumps(backwards)


def test_a_record_keeps_eight_digits_but_its_settings(content):
    content["run"]["dim"] = 123456789
    content["run"]["training"]["lr"] = 0.123456789
    rounded = FinishedRun.rounded(content | {"seconds": 1 / 3})
    assert rounded.seconds == 0.33333333
    assert rounded.run == content["run"]


def test_records_agree_whose_intervals_alone_differ(content):
    record = FinishedRun.of(content)
    wider = json.loads(json.dumps(content))
    wider["table"][0]["R@1_low"] = 0.1
    assert record.agrees(FinishedRun.of(wider))
    wider["table"][0]["R@2"] = 0.9
    assert not record.agrees(FinishedRun.of(wider))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seconds": -1}, "its 'seconds': it is no number that a run has"),
        ({"environment": {}}, "its 'environment.device': Field required"),
        ({"members": []}, "its 'members': List should have at least 1 item"),
        ({"members": ["one"]}, "its 'run', or the 'members' of an ensemble"),
        ({"hits": {"c": "gA=="}}, "its 'hits' of 'c' fit no row of its 'table'"),
        ({"table": [{"dataset": "a"}]}, "its 'table.0.R@1': Field required"),
        ({"name": "a/b"}, "'a/b' cannot be the name of a run"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_a_line_that_names_it(changes, message, content):
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        FinishedRun.of(content | changes)
    assert "\n" not in str(raised.value)
