"""Profiles and runs: what they refuse, what they keep, and when two runs are the same."""

from dataclasses import replace

import pytest
import yaml

from pumalib import config, paths

PROFILES = sorted(path.stem for path in paths.PROFILES.glob("*.yaml"))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_reads_and_makes_every_method(name):
    profile = config.profile(name)
    for method in config.METHODS:
        run = profile.run(method)
        assert config.Run.from_json(run.to_json()) == run


def test_paper_profile_is_the_papers_setting():
    profile = config.profile("paper")
    puma, full = profile.run("puma"), profile.run("full")
    assert (puma.method.prompts, puma.method.prompt_length, puma.method.adapter_rank, puma.method.adapter_keep) == (20, 8, 128, 0.5)
    assert (puma.training.lr, full.training.lr, puma.training.weight_decay) == (1e-4, 3e-5, 1e-4)
    assert (puma.training.batch_size, puma.training.epochs, puma.training.images_per_class) == (720, 100, 4)
    assert puma.training.loss_lr_factor == 1e4 and puma.dim == 128


def test_rank_scale_changes_ranks_and_nothing_else():
    profile = replace(config.profile("paper"), rank_scale=1 / 3)
    assert profile.run("adaptformer").method.adapter_rank == 85
    assert profile.run("vpt").method == config.METHODS["vpt"]
    assert profile.run("puma", adapter_rank=7).method.adapter_rank == 7


@pytest.mark.parametrize("content, message", [
    ({"epoch": 3}, "unknown setting 'epoch'"),
    ({"training": {"epoch": 3}}, r"bad.yaml, training: unknown setting 'epoch'; did you mean 'epochs'"),
    ({"frozen": {"learning_rate": 3}}, "bad.yaml, frozen: unknown setting 'learning_rate'"),
    ({"training": {"lr": "1e-4"}}, r"bad.yaml, training: lr = '1e-4' should be float \(write 1.0e-4"),
    ({"training": {"epochs": 0}}, "epochs = 0; it must be at least 1"),
    ({"training": {"schedule": "linear"}}, "known: constant, step, cosine"),
    ([1], "a profile is a mapping"),
])  # fmt: skip
def test_a_bad_profile_is_refused_with_file_and_field(tmp_path, content, message):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=message):
        config.profile(str(file))


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"no profile 'huge'; known: .*mini"):
        config.profile("huge")
    with pytest.raises(ValueError, match=r"unknown method 'pumma'; known: full, .*puma"):
        config.method("pumma")
    with pytest.raises(ValueError, match=r"unknown setting 'keep'; did you mean|known: .*adapter_keep"):
        config.method("puma", keep=0.3)
    with pytest.raises(ValueError, match="adapter_keep = 1.5 is no probability"):
        config.method("puma", adapter_keep=1.5)
    with pytest.raises(ValueError, match="unknown setting 'epoch'; did you mean 'epochs'"):
        config.profile("mini", epoch=3)


def test_an_override_wins_over_the_recipes():
    profile = config.profile("mini", epochs=2, lr=0.5, datasets=["birds"], seeds=[7])
    for method in ("full", "puma"):
        run = profile.run(method)
        assert (run.training.epochs, run.training.lr, run.data.datasets) == (2, 0.5, ("birds",))
    assert profile.seeds == (7,)


def test_identity_changes_with_numbers_and_not_with_places():
    run = config.Run()
    same = replace(run, pretrained="/elsewhere", data=replace(run.data, root="/elsewhere"),
                   training=replace(run.training, micro_batch=4, workers=3, device="cuda"))  # fmt: skip
    assert run.identity("data", "weights") == same.identity("data", "weights")
    others = [replace(run, seed=1), replace(run, dim=64), replace(run, method=config.METHODS["vpt"]),
              replace(run, loss_settings={"margin": 0.2}), replace(run, training=replace(run.training, lr=1))]  # fmt: skip
    identities = {r.identity("data", "weights") for r in [run, *others]}
    identities |= {run.identity("other", "weights"), run.identity("data", "other")}
    assert len(identities) == len(others) + 3
