"""Tiny runs of every method and every loss give the numbers that golden.json has.

`python tests/test_golden.py` writes that file anew.  Runs that are named and kept have numbers of
the code that made them: whoever moves these numbers raises NUMBERS, or says why they may move.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from pumalib import config, embedder, losses
from pumalib.training import loop

FILE = Path(__file__).with_name("golden.json")
PROFILE = config.Profile(
    "golden",
    data=config.Data(datasets=("photos",), image_size=48, shots=2),
    pretrained="random",
    dim=8,
    rank_scale=0.05,
    training=config.Training(
        epochs=2, batch_size=30, images_per_class=2, lr=1e-4, device="cpu", precision="float32"
    ),
)
# What is not given by a loss alone.
SETTINGS = {"direction": {"loss": "triplet"}}
RUNS = {name: PROFILE.run(name) for name in config.METHODS if name != "pretrained"}
RUNS["pretrained"] = PROFILE.run("pretrained", dim=128)
for loss in losses.list_losses():
    RUNS[f"linear, {loss}"] = PROFILE.run("linear", loss=loss, loss_settings=SETTINGS.get(loss, {}))


def numbers(run):
    """The mean loss of the last epoch, and four coordinates of each of two embeddings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, tqdm(disable=True) as bar:
            setup = loop.build(run, Path(folder))
            reached = loop.fit(setup, Path(folder), bar)
    finally:
        torch.set_num_threads(threads)
    rows = setup.benchmark.test.iloc[[0, -1]]
    embeddings = embedder.embed_rows(setup.model.eval(), setup.benchmark, rows, run.data)
    found = embeddings[:, :4].ravel().tolist()
    if reached.log:
        found.append(reached.log[-1]["loss"])
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_of_finished_runs_are_those_of_today(name):
    known = json.loads(FILE.read_text())
    assert name in known, f"{name} is new: `python tests/test_golden.py` writes its numbers too"
    expected = known[name]
    # Processors round otherwise: by up to 1.9e-5 where every weight is trained.
    assert numbers(RUNS[name]) == pytest.approx(expected, rel=1e-5, abs=4e-5), (
        f"{name}: numbers of finished runs have changed: raise NUMBERS, or say why the numbers "
        "stay; `python tests/test_golden.py` writes today's"
    )


def test_nothing_else_is_among_them():
    assert json.loads(FILE.read_text()).keys() <= RUNS.keys()


if __name__ == "__main__":
    written = {}
    for name, run in RUNS.items():
        written[name] = [float(f"{value:.7g}") for value in numbers(run)]
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in written.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
