"""Profiles and runs: what they refuse, what they keep, and when two runs are the same."""

import json
from dataclasses import replace

import pytest
import yaml

from pumalib import config, paths


@pytest.mark.parametrize("name", sorted(path.stem for path in paths.PROFILES.glob("*.yaml")))
def test_every_profile_reads_and_makes_every_method(name):
    profile = config.profile(name)
    for method in config.METHODS:
        run = profile.run(method)
        assert config.Run.from_dict(json.loads(run.to_json())) == run


def test_paper_profile_is_the_papers_setting():
    profile = config.profile("paper")
    puma, full = profile.run("puma"), profile.run("full")
    method = puma.method
    assert (method.prompts, method.prompt_length, method.adapter_rank, method.adapter_keep) == (20, 8, 128, 0.5)
    assert (puma.training.lr, full.training.lr, puma.training.weight_decay) == (1e-4, 3e-5, 1e-4)
    assert (puma.training.batch_size, puma.training.epochs, puma.training.images_per_class) == (720, 100, 4)
    assert puma.training.loss_lr_factor == 1e4 and puma.dim == 128


def test_quickstart_trains_the_first_seed_of_mini():
    quick, mini = config.profile("quickstart"), config.profile("mini")
    assert quick.seeds == mini.seeds[:1] and all(quick.run(m) == mini.run(m) for m in ("linear", "full", "puma"))


def test_rank_scale_changes_ranks_and_nothing_else():
    profile = replace(config.profile("paper"), rank_scale=1 / 3)
    assert profile.run("adaptformer").method.adapter_rank == 85
    assert profile.run("vpt").method == config.METHODS["vpt"]
    assert profile.run("puma", adapter_rank=7).method.adapter_rank == 7


BAD = [
    ({"epoch": 3}, "unknown setting 'epoch'"),
    ({"training": {"epoch": 3}}, "unknown setting 'epoch'; did you mean 'epochs'"),
    ({"frozen": {"learning_rate": 3}}, "frozen: unknown setting 'learning_rate'"),
    ({"full": None}, "full = None"),
    ({"data": [1]}, r"bad.yaml: data = \[1\]: it should be a dictionary"),
    ({"training": {"epochs": 0}}, "bad.yaml: training.epochs = 0: it should be greater than or equal to 1"),
    ({"training": {"schedule": "linear"}}, "schedule = 'linear': it should be 'constant', 'step' or 'cosine'"),
    ({"name": "../../evil"}, "name = '../../evil'"),
    ([1], "a profile is a mapping"),
]
WRONG = {"epochs": [2.5, True], "seeds": [3, "012", [0, 0], []], "datasets": ["birds", ["birds", "birds"]]}
WRONG |= {"crop_scale": [[1, 0.5], [0, 1]], "lr": [float("nan"), "fast", 0], "dim": [0, 10**9], "clip_value": [-1]}
WRONG |= {"flip": ["perhaps"], "micro_batch": [-4], "device": ["gpu"], "precision": ["float16"], "image_size": [0]}


@pytest.mark.parametrize("content, message", BAD, ids=str)
def test_a_bad_profile_is_refused_with_file_and_field(tmp_path, content, message):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=message):
        config.profile(str(file))


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values], ids=str)
def test_a_wrong_value_is_refused_by_name_whatever_the_way_in(name, value):
    with pytest.raises(ValueError, match=f"profile 'mini': {name}"):
        config.profile("mini", **{name: value})
    part = next(p for p in (config.Data, config.Training, config.Profile) if name in p.__dataclass_fields__)
    with pytest.raises(ValueError, match=name):
        part(**{"name": "x"} if part is config.Profile else {}, **{name: value})


def test_numbers_are_read_as_people_mean_them(tmp_path):
    file = tmp_path / "fine.yaml"
    file.write_text("training: {lr: 1e-4, epochs: 2.0}\ndata: {flip: 'false'}")  # YAML 1.1 reads 1e-4 as text
    profile = config.profile(str(file))
    assert (profile.training.lr, profile.training.epochs, profile.data.flip) == (1e-4, 2, False)
    assert isinstance(profile.training.epochs, int)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"no profile 'huge'; known: .*mini"):
        config.profile("huge")
    with pytest.raises(ValueError, match=r"unknown method 'pumma'; did you mean 'puma'\? known: full, .*puma"):
        config.method("pumma")
    with pytest.raises(ValueError, match=r"unknown setting 'keep'; .*known: .*adapter_keep"):
        config.method("puma", keep=0.3)
    with pytest.raises(ValueError, match="adapter_keep = 1.5: it should be less than or equal to 1"):
        config.method("puma", adapter_keep=1.5)


def test_an_override_wins_over_the_recipes():
    profile = config.profile("mini", epochs=2, lr=0.5, datasets=["birds"], seeds=[7])
    for method in ("full", "puma"):
        run = profile.run(method)
        assert (run.training.epochs, run.training.lr, run.data.datasets) == (2, 0.5, ("birds",))
    assert profile.seeds == (7,) and profile.side_seeds == ()
    assert config.profile("photos").data.split and not config.profile("photos", root="/images").data.split


def test_identity_changes_with_numbers_and_not_with_places():
    run = config.Run()
    training = replace(run.training, micro_batch=4, workers=3, device="cuda")
    same = replace(run, pretrained="/elsewhere", data=replace(run.data, root="/elsewhere"), training=training)
    assert run.identity("data", "weights") == same.identity("data", "weights")
    changes = [{"seed": 1}, {"dim": 64}, {"method": config.METHODS["vpt"]}, {"loss_settings": {"margin": 0.2}}]
    changes += [{}, {"training": replace(run.training, lr=1)}]
    identities = {replace(run, **change).identity("data", "weights") for change in changes}
    assert len(identities | {run.identity("other", "weights"), run.identity("data", "other")}) == len(changes) + 2
