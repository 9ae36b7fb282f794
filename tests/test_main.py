"""The command line: what it prints, what it returns, and how it refuses."""

import numpy as np
import pytest
from PIL import Image

from pumalib.__main__ import main


@pytest.fixture
def folders(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c", "d"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "set" / name / f"{i}.png")
    return tmp_path


def test_status_names_every_dataset_and_what_to_do(tmp_path, capsys):
    assert main(["data", "status", "--root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("cub", "cars", "sop", "inshop", "nabirds", "dogs", "flowers", "aircraft"))
    assert "missing" in said


def test_datasets_that_cannot_be_fetched_come_with_instructions(tmp_path, capsys):
    assert main(["data", "download", "cars", "--root", str(tmp_path)]) == 1
    assert "cars_annos.mat" in capsys.readouterr().err


def test_prepare_and_verify_folders(folders, capsys):
    common = ["--benchmark", "folders", "--root", str(folders)]
    assert main(["data", "prepare", *common, "--workers", "0"]) == 0
    assert main(["data", "verify", *common]) == 0
    assert "every image can be decoded" in capsys.readouterr().out
    (folders / "set" / "a" / "0.png").write_bytes(b"no image")
    assert main(["data", "verify", *common]) == 1
    assert "0.png" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["data", "download", "cubb"], "unknown dataset 'cubb'; known: "),
    (["data", "prepare", "--benchmark", "folders", "--root", "nowhere"], "nowhere"),
])  # fmt: skip
def test_errors_are_one_line_and_a_status(arguments, message, capsys):
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ") and "Traceback" not in said


@pytest.mark.parametrize("arguments", [["data", "dance"], ["bench", "nothing"], []])
def test_unknown_commands_are_refused_with_the_known(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "choose from" in capsys.readouterr().err or not arguments


def test_bench_losses_runs_quickly_and_writes_its_table(tmp_path, monkeypatch, capsys):
    from pumalib import paths

    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    assert main(["bench", "losses", "--quick"]) == 0
    assert (tmp_path / "bench").is_dir() and list((tmp_path / "bench").glob("losses-*.csv"))
