"""Three kept runs without training: their queries hit at random, at a rate of their own."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from puma_study import record, store
from puma_study.record import FailedRun, FinishedRun
from pumalib import config, data, evaluation, paths
from pumalib.training import run_folder

QUERIES = {"digits": 40, "aircraft": 60}
DATA = config.Data(datasets=tuple(QUERIES), image_size=48)
PROFILE = config.Profile("test", data=DATA, pretrained="random", training=config.Training(epochs=3))
RUNS = {
    "linear": PROFILE.run("linear"),
    "puma": PROFILE.run("puma"),
    "again": PROFILE.run("linear", seed=1),
}


def numbers(seed, rate):
    """A run's record without its settings, for queries that are correct at this rate."""
    rng = np.random.default_rng(seed)
    metrics = [f"R@{k}" for k in evaluation.KS] + ["RP", "MAP@R"]
    hits = {name: rng.random((count, 1)) < rate for name, count in QUERIES.items()}
    hits["unified"] = np.concatenate(list(hits.values()))
    values = {
        name: np.repeat(hit.astype(float), len(metrics), axis=1) for name, hit in hits.items()
    }
    classes = {name: np.arange(len(value)) // 4 for name, value in values.items()}
    scores = evaluation.Scores(tuple(metrics), values, classes, dict.fromkeys(values, 0))
    return {
        "environment": {"device": "cpu"},
        "log": [],
        "images_per_second": 4.0 + seed,
        "parameters": {"trainable": 1, "total": 2},
        "seconds": 1 / 3,
        "table": scores.table().reset_index(names="dataset").to_dict("records"),
        **scores.packed(),
    }


def results_of(run, seed, rate):
    """`numbers` of this run, with the digest of its data, which its name depends on."""
    environment = {"device": "cpu", "data": data.load(run.data).digest}
    return numbers(seed, rate) | {"environment": environment}


def trained(run, seed=0, rate=0.5):
    """The folder of a finished run."""
    folder = store.folder(run_folder.run_name(run), "test")
    run_folder.make(folder)
    (folder / store.MODEL).touch()
    (folder / "run.json").write_text(run.to_json())
    record = {"run": json.loads(run.to_json()), **results_of(run, seed, rate)}
    (folder / run_folder.FINISHED).write_text(json.dumps(record))
    return folder


def finish(folder):
    with store.held(folder):
        pass


def keep_three():
    """Keep `RUNS`, several at once, and no folders; their names."""
    folders = {}
    for seed, (key, run) in enumerate(RUNS.items()):
        folders[key] = trained(run, seed, 0.9 - 0.3 * seed)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(finish, folders.values()))
    shutil.rmtree(paths.RESULTS / "test" / "runs")
    return {key: folder.name for key, folder in folders.items()}


def add(content, profile="test"):
    """Keep a finished run of this content; its name."""
    finished = FinishedRun.rounded(content)
    store.add(finished, profile)
    return finished.name


def add_failed(content, profile="test"):
    """Keep a failed run of this content; its name."""
    failed = FailedRun.of(content)
    store.add_failure(failed, profile)
    return failed.name


def keep(run, profile, rate, **more):
    """Keep a run of a profile whose queries are correct at this rate."""
    content = {"run": json.loads(run.to_json()), **results_of(run, 1, rate), **more}
    add({"name": run_folder.run_name(run), **content}, profile.name)


def fail(run, profile):
    """Keep that the loss of a run was not finite."""
    happened = {"where": "epoch 1, batch 2", "what": "the loss is nan"}
    content = {"run": json.loads(run.to_json()), "environment": {"device": "cpu"}, **happened}
    add_failed({"name": run_folder.run_name(run), **content}, profile.name)


def another(name="another", **changes):
    """The content of the record of another run, as `add` takes it."""
    run = json.loads(RUNS["linear"].to_json())
    return {"name": name, "run": run, **numbers(9, 0.5), **changes}


def any_name(monkeypatch):
    """Let tests give runs any name, independent of their settings."""
    monkeypatch.setattr(record, "check_name_of", lambda record: None)


def kept_file(number=1):
    return paths.RESULTS / "test" / f"kept-{number}.jsonl"


def texts(number=1):
    return kept_file(number).read_text().splitlines()


def add_text(*lines):
    """Append lines to the first kept file as they are."""
    with kept_file().open("a") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def line_of(content):
    """A line with the right digest, whatever it holds."""
    return json.dumps(content | {"digest": run_folder.short_hash(content)})
