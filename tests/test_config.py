"""Profiles and runs: settings they refuse, settings they store, and when two runs are equal."""

import json
from dataclasses import asdict, field, replace

import pytest
import yaml
from pydantic.dataclasses import dataclass

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
    assert (method.prompts, method.prompt_length, method.adapter_rank, method.adapter_keep) == (
        20,
        8,
        128,
        0.5,
    )
    assert (puma.training.lr, full.training.lr, puma.training.weight_decay) == (1e-4, 3e-5, 1e-4)
    assert (puma.training.batch_size, puma.training.epochs, puma.training.images_per_class) == (
        720,
        100,
        4,
    )
    assert puma.training.loss_lr_factor == 1e4 and puma.dim == 128


def test_quickstart_trains_the_first_seed_of_mini():
    quick, mini = config.profile("quickstart"), config.profile("mini")
    assert quick.seeds == mini.seeds[:1] and all(
        quick.run(m) == mini.run(m) for m in ("linear", "full", "puma")
    )


def test_rank_scale_changes_ranks_and_nothing_else():
    profile = replace(config.profile("paper"), rank_scale=1 / 3)
    assert profile.run("adaptformer").method.adapter_rank == 85
    assert profile.run("vpt").method == config.METHODS["vpt"]
    assert profile.run("puma", adapter_rank=7).method.adapter_rank == 7


def test_a_method_given_whole_keeps_its_own_lengths():
    profile = replace(config.profile("paper"), rank_scale=0.5, prompt_scale=0.25)
    scaled = profile.run("puma").method
    assert (scaled.adapter_rank, scaled.prompt_length) == (64, 2)
    assert profile.run(scaled).method == scaled
    own = config.method("puma", adapter_rank=4, prompt_length=1)
    assert profile.run(own).method == own


def test_what_a_method_has_never_vanishes_by_scaling():
    tiny = replace(config.profile("paper"), rank_scale=0.001, prompt_scale=0.001)
    method = tiny.run("puma+lora").method
    assert (method.adapter_rank, method.lora_rank, method.prompt_length) == (1, 1, 1)


BAD = [
    ({"epoch": 3}, "unknown setting 'epoch'"),
    ({"training": {"epoch": 3}}, "unknown setting 'epoch'; did you mean 'epochs'"),
    (
        {"recipes": {"frozen backbone": {"learning_rate": 3}}},
        "recipes.frozen backbone: unknown setting 'learning_rate'",
    ),
    ({"recipes": None}, "recipes = None"),
    ({"recipes": {"pumma": {}}}, "bad.yaml: recipes: unknown method 'pumma'; did you mean 'puma'"),
    ({"recipes": {"puma": {"rate": 1}}}, "recipes.puma: unknown .*'rate'.*known: .*adapter_keep"),
    ({"recipes": {"puma": {"name": "x"}}}, "recipes.puma: unknown setting 'name'"),
    ({"recipes": {"puma": {"lr": "fast"}}}, "bad.yaml: recipes.puma: lr = 'fast': it should be"),
    ({"recipes": {"puma": {"adapter_keep": 2}}}, "bad.yaml: recipes.puma: adapter_keep = 2"),
    ({"recipes": {"puma": 3e-4}}, "recipes.puma = 0.0003: it should be a"),
    ({"recipes": {"pumma/ms": {}}}, "recipes: unknown method 'pumma'; did you mean 'puma'"),
    ({"recipes": {"full/ms": {"rate": 1}}}, "recipes.full/ms: unknown .*'rate'"),
    ({"recipes": {"full/ms": {"adapter_scale": 1}}}, "recipes.full/ms: unknown .*'adapter_scale'"),
    ({"recipes": {"full/ms": {"lr": "fast"}}}, "recipes.full/ms: lr = 'fast'"),
    ({"full": None}, "bad.yaml: full: it should be"),
    ({"tuned": {"puma": 3e-4}}, "bad.yaml: tuned: puma = 0.0003: it should be a"),
    ({"tuned_losses": {"full": {"ms": 1}}}, "bad.yaml: tuned_losses: full.ms = 1"),
    ({"tuned": {}, "recipes": {}}, "what stands under tuned belongs under recipes"),
    ({"large": ["birds", "birds"]}, "large = .*give each once"),
    ({"large": "birds"}, "large = 'birds'"),
    ({"data": [1]}, r"bad.yaml: data = \[1\]: it should be a dictionary"),
    (
        {"training": {"epochs": 0}},
        "bad.yaml: training.epochs = 0: it should be greater than or equal to 1",
    ),
    (
        {"training": {"schedule": "linear"}},
        "schedule = 'linear': it should be 'constant', 'step' or 'cosine'",
    ),
    ({"name": "../../evil"}, "name = '../../evil'"),
    ({"backbone": "mini_vit", "pretrained": "hub"}, "pretrained = 'hub' has no weights"),
    ([1], "a profile is a mapping"),
]
WRONG = {
    "epochs": [2.5, True],
    "seeds": [3, "012", [0, 0], []],
    "datasets": ["birds", ["birds", "birds"]],
    "crop_scale": [[1, 0.5], [0, 1]],
    "lr": [float("nan"), "fast", 0],
    "dim": [0, 10**9],
    "clip_value": [-1],
    "flip": ["perhaps"],
    "micro_batch": [-4, "all", True],
    "device": ["gpu"],
    "precision": ["float16"],
    "image_size": [0],
}


@pytest.mark.parametrize("content, message", BAD, ids=str)
def test_a_bad_profile_is_refused_with_file_and_field(tmp_path, content, message):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=message):
        config.profile(str(file))


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in WRONG.items() for value in values], ids=str
)
def test_a_wrong_value_is_refused_by_name_whatever_the_way_in(name, value):
    with pytest.raises(ValueError, match=f"profile 'mini': {name}"):
        config.profile("mini", **{name: value})
    part = next(
        p for p in (config.Data, config.Training, config.Profile) if name in p.__dataclass_fields__
    )
    with pytest.raises(ValueError, match=name):
        part(**{"name": "x"} if part is config.Profile else {}, **{name: value})


def test_numbers_are_read_as_people_mean_them(tmp_path):
    file = tmp_path / "fine.yaml"
    file.write_text("training: {lr: 1e-4, epochs: 2.0}\ndata: {flip: 'false'}")
    profile = config.profile(str(file))
    assert (profile.training.lr, profile.training.epochs, profile.data.flip) == (1e-4, 2, False)
    assert isinstance(profile.training.epochs, int)


def test_a_number_with_an_exponent_is_one_without_a_point():
    read = config.read_yaml("[3e-4, 3.0e-4, 1E+3, -2e1, '3e-4', 3e, e3, 1e-4-8e-4]")
    assert read == [0.0003, 0.0003, 1000.0, -20.0, "3e-4", "3e", "e3", "1e-4-8e-4"]


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"no profile 'huge'; known: .*mini"):
        config.profile("huge")
    with pytest.raises(
        ValueError, match=r"unknown method 'pumma'; did you mean 'puma'\? known: full, .*puma"
    ):
        config.method("pumma")
    with pytest.raises(ValueError, match=r"unknown setting 'keep'; .*known: .*adapter_keep"):
        config.method("puma", keep=0.3)
    with pytest.raises(
        ValueError, match=r"adapter_keep = 1\.5: it should be less than or equal to 1"
    ):
        config.method("puma", adapter_keep=1.5)


def test_an_override_wins_over_the_recipes():
    profile = config.profile("mini", epochs=2, lr=0.5, datasets=["birds"], seeds=[7])
    for method in ("full", "puma"):
        run = profile.run(method)
        assert (run.training.epochs, run.training.lr, run.data.datasets) == (2, 0.5, ("birds",))
    assert profile.seeds == (7,) and profile.side_seeds == ()
    assert (
        config.profile("photos").data.split
        and not config.profile("photos", root="/images").data.split
    )


def test_a_length_stretches_epochs_and_steps_and_keeps_the_rest():
    """Half of 5 epochs is 2, a tenth is one; at 1 it is the row's own run."""
    profile = config.profile("mini", epochs=5, schedule="step", step_epochs=4)
    usual = profile.run("puma", adapter_keep=0.3)
    half = profile.at_length("puma", 0.5, adapter_keep=0.3)
    assert (half.training.epochs, half.training.step_epochs) == (2, 2)
    stretched = replace(usual.training, epochs=2, step_epochs=2)
    assert half == replace(usual, training=stretched)
    assert profile.at_length("puma", 0.1).training.epochs == 1
    assert profile.at_length("puma", 1, adapter_keep=0.3) == usual
    asked = profile.at_length("puma", 4, training={"lr": 1e-5}).training
    assert (asked.epochs, asked.lr) == (20, 1e-5)


# ---- Recipes of single methods and losses

TUNED = {
    "puma": {"lr": 3e-4, "adapter_scale": 1.0, "epochs": 3},
    "full": {"lr": 2e-4, "new_lr_factor": 1},
}


def tuned_mini(recipes=TUNED):
    return config.profile("mini", recipes=recipes)


def test_each_method_has_what_was_tuned_for_it_and_no_other_has():
    mini, tuned = config.profile("mini"), tuned_mini()
    puma = tuned.run("puma")
    assert (puma.training.lr, puma.training.epochs, puma.method.adapter_scale) == (3e-4, 3, 1.0)
    assert puma.method.adapter_rank == mini.run("puma").method.adapter_rank, "still scaled"
    full = tuned.run("full").training
    assert (full.lr, full.new_lr_factor, mini.run("full").training.lr) == (2e-4, 1, 1e-3)
    for name in config.METHODS.keys() - TUNED.keys():
        assert tuned.run(name) == mini.run(name)


def test_what_is_asked_for_wins_over_what_was_tuned(tmp_path):
    tuned = tuned_mini()
    asked = tuned.run("puma", training={"lr": 0.5}, adapter_scale=0.2)
    assert (asked.training.lr, asked.training.epochs, asked.method.adapter_scale) == (0.5, 3, 0.2)
    assert tuned.run("puma", adapter_scale=0.1).method.adapter_scale == 0.1, "also the default"
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"recipes": TUNED}))
    read = config.profile(str(file), lr=0.7)
    assert (read.run("puma").training.lr, read.run("full").training.lr) == (0.7, 0.7)
    assert read.run("puma").training.epochs == 3
    asked = config.profile(str(file), recipes={"puma": {"lr": 0.6}}, lr=0.7)
    assert asked.run("puma").training == replace(config.Training(), lr=0.6), (
        "in place of the file's"
    )
    assert asked.run("full").training == read.run("full").training, "the others stay"
    with pytest.raises(ValueError, match="profile 'mine': recipes: it should be"):
        config.profile(str(file), recipes=[1])


def test_what_is_made_of_a_method_has_its_tuning():
    tuned = tuned_mini()
    # By settings, data or loss: an ablation at the method's own rate.
    without_gate = tuned.run("puma", adapter_keep=1.0)
    assert (without_gate.training.lr, without_gate.method.adapter_scale) == (3e-4, 1.0)
    assert tuned.run("puma", loss="ms").training.lr == 3e-4
    # A Method given in place of its name keeps the settings in which it differs.
    changed = config.method("puma", adapter_scale=0.5, prompts=3)
    run = tuned.run(changed)
    assert (run.method.adapter_scale, run.method.prompts, run.training.lr) == (0.5, 3, 3e-4)
    assert tuned.run(config.METHODS["puma"]) == tuned.run("puma")
    # Another name is another method.
    other = replace(config.METHODS["puma"], name="mine")
    assert tuned.run(other) == config.profile("mini").run(other)


def test_a_loss_has_its_own_rate_with_a_method_over_what_the_method_has(tmp_path):
    recipes = {**TUNED, "full/npair": {"lr": 3e-6}, "full/ms": {"loss_lr_factor": 7}}
    tuned = tuned_mini(recipes)
    npair = tuned.run("full", loss="npair").training
    assert (npair.lr, npair.new_lr_factor) == (3e-6, 1), "the rest is the method's"
    ms = tuned.run("full", loss="ms").training
    assert (ms.lr, ms.loss_lr_factor) == (2e-4, 7)
    # Of another loss, and of another method, nothing.
    assert tuned.run("full", loss="triplet") == tuned_mini().run("full", loss="triplet")
    assert tuned.run("puma", loss="npair") == tuned_mini().run("puma", loss="npair")
    assert tuned.run("full") == tuned_mini().run("full")
    # A loss around another one trains it at its rate.
    guided = tuned.run("full", loss="language", loss_settings={"loss": "npair", "weight": 1.0})
    assert guided.training.lr == 3e-6

    # What is asked for wins.
    assert tuned.run("full", loss="npair", training={"lr": 0.5}).training.lr == 0.5
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"recipes": recipes}))
    assert config.profile(str(file), lr=0.7).run("full", loss="npair").training.lr == 0.7
    untuned = config.profile(str(file), recipes={"full/npair": {}})
    assert untuned.run("full", loss="npair").training.lr == 2e-4


def test_a_file_with_the_four_mappings_of_before_gives_the_same_runs(tmp_path):
    four = {
        "full": {"lr": 1e-3, "epochs": 5},
        "frozen": {"lr": 3e-3},
        "tuned": TUNED,
        "tuned_losses": {"full": {"npair": {"lr": 3e-6}}},
    }
    one = {
        "trained backbone": {"lr": 1e-3, "epochs": 5},
        "frozen backbone": {"lr": 3e-3},
        **TUNED,
        "full/npair": {"lr": 3e-6},
    }
    file = tmp_path / "before.yaml"
    file.write_text(yaml.safe_dump(four))
    before = config.profile(str(file))
    assert before == config.Profile("before", recipes=one)
    full = before.run("full", loss="npair").training
    assert (full.lr, full.new_lr_factor, full.epochs) == (3e-6, 1, 5)
    assert before.run("linear").training.lr == 3e-3


def test_the_classifier_of_the_plain_softmax_learns_as_new_layers_do():
    tuned = tuned_mini({"full": {"new_lr_factor": 3}, "linear": {"loss_lr_factor": 1000}})
    assert tuned.run("full", loss="crossentropy").training.loss_lr_factor == 3
    assert tuned.run("linear", loss="crossentropy").training.loss_lr_factor == 10
    assert tuned.run("full", loss="normsoftmax").training.loss_lr_factor == 1e4, "directions"
    guided = {"loss": "crossentropy", "weight": 1.0}
    guided = tuned.run("full", loss="language", loss_settings=guided)
    assert guided.training.loss_lr_factor == 3

    # Who asks for another factor gets it.
    asked = {"loss_lr_factor": 7}
    assert tuned.run("full", loss="crossentropy", training=asked).training.loss_lr_factor == 7
    profile = config.profile("mini", **asked)
    assert profile.run("full", loss="crossentropy").training.loss_lr_factor == 7
    tuned = tuned_mini({"full/crossentropy": asked})
    assert tuned.run("full", loss="crossentropy").training.loss_lr_factor == 7


def test_a_rank_that_was_tuned_is_taken_to_the_letter():
    tuned = tuned_mini({"adapter": {"adapter_rank": 7}})
    assert tuned.run("adapter").method.adapter_rank == 7


def test_the_fingerprint_changes_with_numbers_and_not_with_places():
    run = config.Run()
    training = replace(run.training, micro_batch=4, workers=3, device="cuda")
    data = replace(run.data, root="/elsewhere")
    same = replace(run, pretrained="/elsewhere", data=data, training=training)
    assert run.fingerprint("data", "weights") == same.fingerprint("data", "weights")
    changes = [
        {},
        {"seed": 1},
        {"dim": 64},
        {"method": config.METHODS["vpt"]},
        {"loss_settings": {"margin": 0.2}},
        {"training": replace(run.training, lr=1)},
    ]
    fingerprints = [replace(run, **change).fingerprint("data", "weights") for change in changes]
    fingerprints.append(run.fingerprint("other", "weights"))
    fingerprints.append(run.fingerprint("data", "other"))
    fingerprints.append(run.fingerprint("data", "weights", {"margin": 0.2}))
    assert len(set(fingerprints)) == len(changes) + 3
    assert run.fingerprint("data", "weights", more={}) == run.fingerprint("data", "weights")


# ---- A setting that is added later


@dataclass(frozen=True, config=config.CHECKED)
class NewerMethod(config.Method):
    """With one field more, whose default has become another since."""

    temperature: float = config.added(1.0, default=2.0)
    places: list[int] = config.added([])


@dataclass(frozen=True, config=config.CHECKED)
class NewerRun(config.Run):
    method: NewerMethod = field(default_factory=NewerMethod)


def newer(**settings):
    """The default run, its method with the newer fields."""
    method = asdict(config.Run().method)
    return NewerRun(method=NewerMethod(**{**method, **settings}))


def test_a_new_setting_at_its_hash_default_renames_nothing_and_another_value_does():
    before = config.Run().fingerprint("data", "weights")
    assert newer(temperature=1.0).fingerprint("data", "weights") == before
    names = {
        newer(temperature=1.0, places=[1]).fingerprint("data", "weights"),
        newer(temperature=2.0).fingerprint("data", "weights"),
        newer(temperature=3.0).fingerprint("data", "weights"),
    }
    assert len(names) == 3 and before not in names
    assert newer() == newer(temperature=2.0), "who asks for nothing gets the default"


def test_a_schedule_of_gates_enters_a_name_where_it_is_another():
    run = config.Run()
    record = json.loads(run.to_json())
    del record["method"]["adapter_schedule"]
    assert config.Run.from_dict(record) == run
    late = replace(run, method=config.method("puma", adapter_schedule="late"))
    assert late.fingerprint("data", "weights") != run.fingerprint("data", "weights")


def test_a_record_without_the_setting_is_read_with_what_it_had_then():
    record = json.loads(config.Run().to_json())
    read = NewerRun.from_dict(record)
    assert read.method.temperature == 1.0 and read.method.places == []
    assert read.fingerprint("data", "weights") == config.Run().fingerprint("data", "weights")
    again = NewerRun.from_dict(json.loads(newer(temperature=2.0).to_json()))
    assert again.method.temperature == 2.0
    read.method.places.append(1)
    assert NewerRun.from_dict(record).method.places == [], "each has a list of its own"
    assert NewerMethod().places == []


def test_parts_of_their_own_enter_a_name_where_there_are_some():
    run = config.Run()
    record = json.loads(run.to_json())
    del record["method"]["part"], record["method"]["part_settings"]
    assert config.Run.from_dict(record) == run
    other = replace(run, method=config.method("puma", part="some", part_settings={"rank": 4}))
    assert other.fingerprint("data", "weights") != run.fingerprint("data", "weights")


# ---- What cannot be trained, or would be ignored

UNTRAINABLE = {
    "a pool of deep prompts": ("method", {"prompts": 3, "prompt_deep": True}, "prompt_deep"),
    "classes above batches": ("training", {"batch_size": 3}, "images_per_class = 4 is more than"),
    "patience without scores": ("training", {"patience": 2}, "2 counts .* set score_epochs = 1"),
    "the hub for mini_vit": (None, {"pretrained": "hub"}, "pretrained = 'hub' has no weights"),
}


@pytest.mark.parametrize("part, settings, message", UNTRAINABLE.values(), ids=UNTRAINABLE)
def test_what_cannot_be_trained_is_refused_and_read_where_it_was_kept(part, settings, message):
    if part is None:
        changed = settings
        owner = config.Run()
    else:
        owner = getattr(config.Run(), part)
        changed = {part: {**asdict(owner), **settings}}
    with pytest.raises(ValueError, match=message):
        replace(owner, **settings)
    record = {**json.loads(config.Run().to_json()), **changed}
    assert json.loads(config.Run.from_dict(record).to_json()) == record


def test_refusals_name_the_profile_and_the_remedy():
    profile = config.profile("mini")
    with pytest.raises(
        ValueError, match=r"method 'vpt-deep': prompt_deep is for one .* set prompts"
    ):
        profile.run("vpt-deep", prompts=2)
    with pytest.raises(
        ValueError, match=r"profile 'mini': images_per_class = 31 .* raise batch_size"
    ):
        config.profile("mini", images_per_class=31)
    with pytest.raises(ValueError, match=r"profile 'mini': pretrained = 'hub' .* set pretrained ="):
        config.profile("mini", pretrained="hub")
    with pytest.raises(ValueError, match=r"profile 'mini': seed = 99999999999: it should be less"):
        profile.run("puma", seed=99999999999)
    for given in ({"name": "x"}, {"name": "x", "prompts": 2}):
        with pytest.raises(ValueError, match="method 'puma': unknown setting 'name'"):
            profile.run("puma", **given)
    with pytest.raises(ValueError, match="profile 'mini': unknown setting 'name'"):
        config.profile("mini", name="x")
    with pytest.raises(ValueError, match="training and lr are both given; give lr within training"):
        config.profile("mini", training={"epochs": 2}, lr=0.5)


@pytest.mark.parametrize(
    "text, message",
    {
        "full: {epochs: 1}\nseeds: [1]\nfull: {lr: 1}": "the key 'full' stands twice .*line 3",
        "training: {epochs: 1, lr: 1, epochs: 2}": "the key 'epochs' stands twice",
        "full: " + 4000 * "[": "nested too deep",
        "full: {a: " + 4000 * "[" + 4000 * "]" + "}": "nested too deep",
        "when: 2001-99-99": "is no YAML: month must be in",
        "a: [": "is no YAML",
        "dim: 1" + 3000 * ":59": "dim = a large int: it should be",
        "name: ../up": r"name = '\.\./up': it should match",
        f"name: {61 * 'n'}": "it should have at most 60 characters",
        "name: bench": "results/bench holds other results; give it another name",
    }.items(),
    ids=[
        "twice",
        "twice within",
        "deep",
        "deep and closed",
        "no date",
        "unclosed",
        "a number of base 60",
        "a folder",
        "a long name",
        "the name of the timings",
    ],
)
def test_a_file_that_yaml_reads_wrong_or_not_is_refused(tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.yaml.*{message}"):
        config.profile(str(file))


def test_a_key_may_stand_in_two_mappings_and_be_merged(tmp_path):
    file = tmp_path / "fine.yaml"
    file.write_text("recipes:\n  full: &one {lr: 1, epochs: 2}\n  puma: {<<: *one, lr: 3}")
    recipes = config.profile(str(file)).recipes
    assert recipes == {"full": {"lr": 1, "epochs": 2}, "puma": {"lr": 3, "epochs": 2}}


@pytest.mark.parametrize("place", ["seeds", "dim", "recipes", "lr", "no_field"])
def test_a_message_is_short_whatever_the_value(tmp_path, place):
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for name, below in zip("bcdefghi", "abcdefgh"):
        lines.append(f"{name}: &{name} [{', '.join(9 * [f'*{below}'])}]")
    value = yaml.safe_load("\n".join(lines))["i"]  # ten billion characters, written out
    for bad in (value, {"x": value}, 10**6 * "x"):
        with pytest.raises(ValueError, match=place) as error:
            config.profile("mini", **{place: bad})
        assert len(str(error.value)) < 1500
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join([*lines, f"{place}: *i"]))
    with pytest.raises(ValueError) as error:
        config.profile(str(file))
    assert len(str(error.value)) < 1500


def test_mappings_merged_without_end_are_refused_at_once(tmp_path):
    lines = ["a: &a {lr: 1}"]
    for name, below in zip("bcdefghijklmnop", "abcdefghijklmno"):
        lines.append(f"{name}: &{name} {{<<: [*{below}, *{below}, *{below}]}}")
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"bomb\.yaml.*more than 20 aliases .*line 8"):
        config.profile(str(file))


@pytest.mark.parametrize("field", ["seeds", "side_seeds", "further_seeds"])
def test_a_row_has_a_thousand_seeds_at_most(field):
    with pytest.raises(ValueError, match=rf"{field} = .*at most 1000 items"):
        config.profile("mini", **{field: tuple(range(300_000))})


def test_no_file_elsewhere_takes_the_name_of_one_of_ours(tmp_path):
    ours = paths.PROFILES / "mini.yaml"
    file = tmp_path / "mini.yaml"
    file.write_text(ours.read_text())
    with pytest.raises(ValueError, match=r"'mini' is the name of notebooks/profiles/mini\.yaml"):
        config.profile(str(file))
    other = tmp_path / "other.yaml"
    other.write_text("name: mini")
    with pytest.raises(ValueError, match=r"'mini' is the name of notebooks/profiles/mini\.yaml"):
        config.profile(str(other))
    other.write_text("name: MINI")  # one folder with ours on a Mac
    with pytest.raises(ValueError, match=r"'MINI' is the name of notebooks/profiles/mini\.yaml"):
        config.profile(str(other))
    file.write_text(f"name: mine\n{ours.read_text()}")
    assert config.profile(str(file)).name == "mine"
    assert config.profile(str(ours)) == config.profile("mini")
