"""The searches for settings by method and rates by loss: what they ask for, given scores."""

from dataclasses import replace

import kept_runs
import pandas as pd
import pytest
import yaml

import puma_study as study
from puma_study import search, store
from puma_study.search import (
    LossGrid,
    LossTrial,
    MethodGrid,
    MethodTrial,
    Progress,
    Setting,
    hyperparameter_of,
)
from pumalib import config, losses, paths, training

ALONE = MethodGrid(("linear",), checks=())
SLOW, FAST = hyperparameter_of("linear").values


def curve(*numbers, value=SLOW, start=3e-5, row="linear", **trial):
    """Scores of a row at neighbouring rates from `start` on."""
    place = search.SERIES.index(start)
    rates = search.SERIES[place : place + len(numbers)]
    return {
        MethodTrial(row, Setting(rate, value), **trial): one for rate, one in zip(rates, numbers)
    }


# Its best two are 1e-4 and 3e-4 at the hyperparameter's first value.
INSIDE = curve(0.2, 0.5, 0.4, 0.3) | curve(0.2, 0.3, 0.2, 0.1, value=FAST)


def seconds(first, second):
    """Second seeds of 1e-4 and 3e-4."""
    return {
        MethodTrial("linear", Setting(1e-4, SLOW), seed=1): first,
        MethodTrial("linear", Setting(3e-4, SLOW), seed=1): second,
    }


def run_to_the_end(grid, score):
    """All scores of a search in which `score` says how each trial ends, round by round."""
    scores = {}
    rounds = []
    while asked := grid.pending(scores):
        assert not set(asked) & set(scores), "nothing is asked for twice"
        rounds.append(asked)
        scores |= {trial: score(trial) for trial in asked}
    return scores, rounds


class TestWanted:
    def test_first_all_rows_at_the_first_value_then_their_best_two_at_the_second(self):
        grid = MethodGrid(("puma", "full"))
        puma = [MethodTrial("puma", Setting(rate, 0.1)) for rate in (3e-5, 1e-4, 3e-4, 1e-3)]
        full = [MethodTrial("full", Setting(rate, 10.0)) for rate in (3e-5, 1e-4, 3e-4, 1e-3)]
        assert grid.pending({}) == [*puma, *full]
        assert grid.pending(dict.fromkeys(puma, 0.5)) == full

        scores = dict(zip(puma, (0.1, 0.2, 0.4, 0.3))) | dict(zip(full, (0.1, 0.5, 0.4, 0.3)))
        second = [MethodTrial("puma", Setting(rate, 1.0)) for rate in (3e-4, 1e-3)]
        second += [MethodTrial("full", Setting(rate, 1.0)) for rate in (1e-4, 3e-4)]
        assert grid.pending(scores) == second

    def test_a_better_second_value_is_followed_until_its_best_is_inside(self):
        first = curve(0.2, 0.5, 0.4, 0.3)
        low = first | curve(0.6, 0.4, value=FAST, start=1e-4)
        assert ALONE.pending(low) == [MethodTrial("linear", Setting(3e-5, FAST))]
        inside = low | curve(0.3, value=FAST)
        assert ALONE.pending(inside)[0] == MethodTrial("linear", Setting(1e-4, FAST), seed=1)

    def test_an_optimum_inside_gets_two_second_seeds(self):
        assert ALONE.pending(INSIDE) == list(seconds(0, 0))

    @pytest.mark.parametrize(
        ("numbers", "beyond"),
        [((0.5, 0.4, 0.3, 0.2), 1e-5), ((0.2, 0.3, 0.4, 0.5), 3e-3)],
    )
    def test_an_optimum_at_an_edge_leads_on_at_its_own_value_of_the_hyperparameter(
        self, numbers, beyond
    ):
        at_second_value = curve(*numbers, value=FAST) | curve(0.1, 0.1, 0.1, 0.1)
        assert ALONE.pending(at_second_value) == [MethodTrial("linear", Setting(beyond, FAST))]

    def test_an_edge_is_followed_until_the_best_is_inside_or_the_series_ends(self):
        def rising(trial):
            return search.SERIES.index(trial.setting.rate) / 10 + (trial.setting.value == SLOW) / 20

        scores, rounds = run_to_the_end(ALONE, rising)
        followed = [asked[0].setting.rate for asked in rounds[2:4]]
        assert followed == [3e-3, 1e-2]
        assert ALONE.chosen(scores) == {"linear": Setting(1e-2, SLOW)}
        assert len(scores) == 4 + 2 + 2 + 2

    def test_a_second_seed_that_moves_the_best_to_an_edge_leads_on_again(self):
        first = curve(0.49, 0.5, 0.4, 0.3) | curve(0.1, 0.1, 0.1, 0.1, value=FAST)
        edge, middle = Setting(3e-5, SLOW), Setting(1e-4, SLOW)
        both = first | {MethodTrial("linear", edge, 1): 0.6, MethodTrial("linear", middle, 1): 0.4}
        assert ALONE.pending(both) == [MethodTrial("linear", Setting(1e-5, SLOW))]
        assert ALONE.chosen(both) == {}

        worse = both | {MethodTrial("linear", Setting(1e-5, SLOW)): 0.3}
        assert ALONE.pending(worse) == []
        assert ALONE.chosen(worse) == {"linear": edge}

        better = both | {MethodTrial("linear", Setting(1e-5, SLOW)): 0.55}
        assert ALONE.pending(better) == [MethodTrial("linear", Setting(3e-6, SLOW))]
        inside = better | {MethodTrial("linear", Setting(3e-6, SLOW)): 0.3}
        assert ALONE.pending(inside) == [MethodTrial("linear", Setting(1e-5, SLOW), seed=1)]

    def test_a_loss_that_is_not_finite_is_the_worst_score(self):
        first = curve(0.1, 0.2, 0.3, 0.0) | curve(0.0, 0.0, 0.0, 0.0, value=FAST)
        asked = ALONE.pending(first)
        assert [trial.setting.rate for trial in asked] == [3e-4, 1e-4]

    def test_every_row_has_the_same_first_trials_and_two_seconds(self):
        grid = MethodGrid(checks=())
        scores, _ = run_to_the_end(grid, lambda trial: 0.5 - abs(trial.setting.rate - 2e-4))
        for row in search.METHODS:
            own = [trial for trial in scores if trial.row == row]
            assert sum(trial.seed == 0 for trial in own) == 6
            assert sum(trial.seed == 1 for trial in own) == 2


class TestChosen:
    def test_the_higher_mean_of_two_seeds_not_the_better_first(self):
        assert ALONE.chosen(INSIDE | seconds(0.3, 0.5))["linear"].rate == 3e-4
        assert ALONE.chosen(INSIDE | seconds(0.4, 0.45))["linear"].rate == 1e-4

    def test_of_equals_the_lower_rate(self):
        equal = curve(0.2, 0.5, 0.5, 0.3) | curve(0.1, 0.5, 0.5, 0.1, value=FAST)
        asked = ALONE.pending(equal)
        assert [trial.setting for trial in asked] == [Setting(1e-4, SLOW), Setting(1e-4, FAST)]
        settled = equal | dict.fromkeys(asked, 0.5)
        assert ALONE.chosen(settled) == {"linear": Setting(1e-4, SLOW)}

    def test_nothing_before_the_search_has_ended(self):
        assert ALONE.chosen({}) == {}
        assert ALONE.chosen(INSIDE) == {}


def at_best(rate, times=1):
    """Scores that are best at a rate, of trials at one length, and at another rate longer."""

    def score(trial):
        best = rate
        if trial.times > 1:
            best = times
        distance = search.SERIES.index(trial.setting.rate) - search.SERIES.index(best)
        is_second = trial.setting.value == hyperparameter_of(trial.row).values[1]
        return 0.6 - 0.05 * abs(distance) - 0.01 * is_second

    return score


class TestChecks:
    ROWS = ("linear", "full", "puma")

    def test_length_is_asked_of_full_and_puma_where_it_moves_no_rate(self):
        grid = MethodGrid(self.ROWS, checks=("length",))
        scores, rounds = run_to_the_end(grid, at_best(1e-4, 1e-4))
        longer = [trial for trial in rounds[-1] if trial.times == 2]
        assert {trial.row for trial in longer} == {"full", "puma"}
        assert {trial.setting.rate for trial in longer} == {3e-5, 1e-4, 3e-4}
        assert len(longer) == len(rounds[-1]) == 6
        assert grid.length_moves(scores) == []

    def test_and_of_all_rows_where_it_does_and_they_take_its_rate_from_inside(self):
        grid = MethodGrid(self.ROWS, checks=("length",))
        scores, rounds = run_to_the_end(grid, at_best(1e-4, 1e-3))
        assert grid.length_moves(scores) == ["full", "puma"]
        assert {trial.row for trial in rounds[-1]} == {"linear"}
        chosen = grid.chosen(scores)
        assert {setting.rate for setting in chosen.values()} == {1e-3}
        tried = {trial.setting.rate for trial in scores if trial.times == 2}
        assert max(tried) == 3e-3, "beyond the neighbours, until the best is inside"

    def test_mirroring_is_the_mean_of_four_at_their_best(self):
        grid = MethodGrid(checks=("mirroring",))
        usual = at_best(1e-4)

        def score(trial):
            extra = {"full": 0.03, "puma": 0.01}.get(trial.row, -0.01)
            return usual(trial) + trial.turned * extra

        scores, rounds = run_to_the_end(grid, score)
        assert [trial.row for trial in rounds[-1]] == ["full", "puma", "lora", "linear"]
        assert all(trial.turned and trial.setting.rate == 1e-4 for trial in rounds[-1])
        gain = (0.03 + 0.01 - 0.01 - 0.01) / 4
        assert grid.mirroring_gain(scores) == pytest.approx(gain)

    @pytest.mark.parametrize(("last", "lengths"), [(0.004, {2, 4, 8}), (0.006, {2, 4, 8, 16})])
    def test_convergence_doubles_again_where_the_last_doubling_still_gains(self, last, lengths):
        grid = MethodGrid(("full",), checks=("convergence",))
        usual = at_best(1e-4, 1e-4)
        gained = {1: 0.0, 2: 0.1, 4: 0.15, 8: 0.15 + last, 16: 0.16}
        scores, _ = run_to_the_end(grid, lambda trial: usual(trial) + gained[trial.times])
        longer = [trial for trial in scores if trial.times > 1]
        assert {trial.times for trial in longer} == lengths
        assert {trial.seed for trial in longer} == {0, 1}
        gains = grid.doublings("full", scores)
        assert gains[2] == pytest.approx(0.1)
        assert gains[8] == pytest.approx(last)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": ("pumma",)}, "did you mean 'puma'"),
        ({"rates": (1e-4, 1e-3)}, "neighbours of the series"),
        ({"rates": ()}, "neighbours of the series"),
        ({"checks": ("lenght",)}, "unknown check 'lenght'; known: mirroring"),
    ],
)
def test_a_bad_search_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        MethodGrid(**given)


class TestRuns:
    def test_a_trial_is_the_run_that_the_command_trains(self):
        of_lr = config.profile("photos-8", lr=3e-4, holdout=True)
        scaled = MethodTrial("puma", Setting(3e-4, 1.0))
        profile = config.profile("photos-8")
        assert ALONE.run_for(scaled, profile) == of_lr.run("puma", seed=0, adapter_scale=1.0)
        default = MethodTrial("puma", Setting(3e-4, 0.1), seed=1)
        assert ALONE.run_for(default, profile) == of_lr.run("puma", seed=1)
        head = config.profile("photos-8", lr=1e-4, holdout=True, new_lr_factor=1.0)
        full = MethodTrial("full", Setting(1e-4, 1.0))
        assert ALONE.run_for(full, profile) == head.run("full", seed=0)

    def test_checks_change_epochs_and_mirroring_alone(self):
        profile = config.profile("photos-8")
        trial = MethodTrial("lora", Setting(1e-3, 4.0))
        usual = ALONE.run_for(trial, profile)
        turned = ALONE.run_for(replace(trial, turned=True), profile)
        assert turned == replace(usual, data=replace(usual.data, flip=False))
        longer = ALONE.run_for(replace(trial, times=2), profile)
        assert longer.training.epochs == 16
        assert replace(longer, training=usual.training) == usual

    def test_every_hyperparameter_is_a_setting_and_its_first_value_the_default(self):
        assert {hyperparameter_of(row).name for row in search.METHODS} == {
            "adapter_scale",
            "lora_scale",
            "new_lr_factor",
            "loss_lr_factor",
        }
        for row in search.METHODS:
            hyperparameter = hyperparameter_of(row)
            run = config.Profile("x").run(row)
            default = vars(run.method) | vars(run.training)
            assert default[hyperparameter.name] == hyperparameter.values[0]


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """The profile of the kept runs, with an empty folder of results."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return kept_runs.PROFILE


def keep(trial, profile, rate):
    kept_runs.keep(ALONE.run_for(trial, profile), profile, rate)


def fail(trial, profile):
    kept_runs.fail(ALONE.run_for(trial, profile), profile)


class TestReplay:
    SEARCH = MethodGrid(("linear",), (1e-4, 3e-4), checks=())

    def test_it_goes_on_from_what_is_kept_and_names_what_is_missing(self, profile):
        grid = self.SEARCH.pending({})
        for trial in grid[:-1]:
            keep(trial, profile, 0.5)
        keep(MethodTrial("linear", Setting(1e-2, SLOW)), profile, 0.9)
        progress = search.replay(self.SEARCH, profile)
        assert list(progress.scores) == grid[:-1], "what the rule does not ask for does not count"
        name = training.run_name(ALONE.run_for(grid[-1], profile))
        assert progress.missing == {grid[-1]: name}

        fail(grid[-1], profile)
        lost = search.replay(self.SEARCH, profile)
        assert lost.scores[grid[-1]] == 0
        assert lost.missing
        table = search.table(self.SEARCH, lost, profile)
        assert table.set_index("run").at[name, "harmonic"] == 0
        assert pd.isna(table.set_index("run").at[name, "unified"])

    def test_rounds_train_until_nothing_is_pending(self, profile, monkeypatch):
        wrecked = self.SEARCH.pending({})[1]

        def run_all(rows, asked, may_fail):
            assert may_fail == rows, "a search has a use for what fails"
            for run in rows.values():
                run = replace(run, seed=asked.seeds[0])
                if run == ALONE.run_for(wrecked, profile):
                    fail(wrecked, profile)
                    continue
                setting = Setting(run.training.lr, run.training.loss_lr_factor)
                keep(MethodTrial("linear", setting, run.seed), profile, 0.5)

        monkeypatch.setattr(search, "run_all", run_all)
        progress = search.replay(self.SEARCH, profile)
        while progress.missing:
            search.train(self.SEARCH, progress.missing, profile)
            progress = search.replay(self.SEARCH, profile)
        assert progress.scores[wrecked] == 0
        assert set(self.SEARCH.chosen(progress.scores)) == {"linear"}


def constructed(best):
    """The table of a search of one row whose best rate is `best`."""
    scores, _ = run_to_the_end(ALONE, at_best(best))
    names = {trial: str(number) for number, trial in enumerate(scores)}
    return search.table(ALONE, Progress(scores, names, {}), kept_runs.PROFILE)


class TestTable:
    def test_it_says_which_trials_are_chosen(self, profile):
        table = constructed(3e-4)
        assert list(table.columns) == ALONE.columns
        chosen = table[table["chosen"]]
        assert chosen[["rate", "value", "seed"]].to_numpy().tolist() == [
            [3e-4, SLOW, 0],
            [3e-4, SLOW, 1],
        ]
        assert search.at_edge(table) == []

    def test_a_run_has_its_loss_on_training_images_where_it_was_kept(self, profile):
        grid = MethodGrid(("linear",), (1e-4, 3e-4), checks=())
        without, has = grid.pending({})[:2]
        keep(without, profile, 0.5)
        kept_runs.keep(ALONE.run_for(has, profile), profile, 0.5, open_loss=1.25)
        table = search.table(grid, search.replay(grid, profile), profile)
        losses = table.set_index("rate")["open_loss"]
        assert pd.isna(losses[without.setting.rate])
        assert losses[has.setting.rate] == 1.25

    def test_an_optimum_at_an_edge_is_found(self, profile):
        table = constructed(3e-4)
        lower = table[(table["rate"] >= 3e-4) | (table["value"] != SLOW)]
        assert search.at_edge(lower) == ["linear"]
        higher = table[(table["rate"] <= 3e-4) | (table["value"] != SLOW)]
        assert search.at_edge(higher) == ["linear"]
        assert search.at_edge(constructed(1e-2)) == ["linear"], "the series ends there"

    def test_a_profile_can_read_the_chosen_settings(self):
        scores = INSIDE | seconds(0.3, 0.5)
        assert ALONE.recipes(scores) == {"linear": {"lr": 3e-4, "loss_lr_factor": 1e4}}
        block = search.yaml_recipes(
            {"puma": {"lr": 3e-5, "adapter_scale": 1.0}, "linear": {"lr": 1e-3}}
        )
        assert yaml.safe_load(block) == {
            "recipes": {"puma": {"lr": 3e-5, "adapter_scale": 1}, "linear": {"lr": 1e-3}}
        }


TUNED = sorted((paths.ROOT / "results").glob("*/tuning.csv"))


@pytest.mark.skipif(not TUNED, reason="no tuning.csv is kept yet")
@pytest.mark.parametrize("file", TUNED, ids=lambda file: file.parent.name)
def test_no_kept_optimum_is_at_an_edge_and_numbers_are_of_their_runs(file, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", paths.ROOT / "results")
    table = pd.read_csv(file)
    assert search.at_edge(table) == []
    kept = store.read(file.parent.name)
    finite = table.dropna(subset=["unified"])
    assert len(finite)
    for line in finite.itertuples():
        accuracies = kept[line.run].accuracies
        assert accuracies["harmonic"] == pytest.approx(line.harmonic, abs=1e-5), line.run


# ---- rates by loss

PAIRS = LossGrid(losses=("ms", "npair"))
START = {1e-5: 0.0, 3e-5: 0.3, 1e-4: 0.5, 3e-4: 0.4}


def scores_of(**by_loss):
    """Scores of losses by rate."""
    found = {}
    for loss, by_rate in by_loss.items():
        found |= {LossTrial(loss, rate): score for rate, score in by_rate.items()}
    return found


class TestWantedOfLosses:
    def test_first_every_loss_at_every_rate(self):
        asked = PAIRS.pending({})
        of_ms = [LossTrial("ms", rate) for rate in (3e-5, 1e-4, 3e-4)]
        assert asked[:3] == of_ms
        assert len(asked) == 6
        known = dict.fromkeys(of_ms, 0.5)
        assert {trial.loss for trial in PAIRS.pending(known)} == {"npair"}

    def test_nothing_where_the_mean_is_best_inside_though_a_loss_is_best_at_an_edge(self):
        inside = scores_of(
            ms={3e-5: 0.1, 1e-4: 0.6, 3e-4: 0.2}, npair={3e-5: 0.3, 1e-4: 0.2, 3e-4: 0.1}
        )
        assert PAIRS.pending(inside) == []
        assert PAIRS.chosen(inside) == {"pair": 1e-4}

    def test_an_edge_is_followed_by_all_losses_of_the_family_and_no_other(self):
        grid = LossGrid(losses=("ms", "npair", "proxyanchor"))
        scores = scores_of(
            ms={3e-5: 0.6, 1e-4: 0.5, 3e-4: 0.2},
            npair={3e-5: 0.3, 1e-4: 0.2, 3e-4: 0.0},
            proxyanchor={3e-5: 0.3, 1e-4: 0.5, 3e-4: 0.4},
        )
        assert grid.pending(scores) == [LossTrial("npair", 1e-5), LossTrial("ms", 1e-5)]
        assert grid.chosen(scores) == {}, "not before the search has ended"
        scores |= {LossTrial("ms", 1e-5): 0.1, LossTrial("npair", 1e-5): 0.1}
        assert grid.chosen(scores) == {"pair": 3e-5, "proxy": 1e-4}

    def test_an_edge_is_followed_to_the_end_of_the_series(self):
        grid = LossGrid(losses=("ms",))
        scores = {}
        while asked := grid.pending(scores):
            scores |= {trial: -trial.rate for trial in asked}
        assert grid.chosen(scores) == {"pair": 3e-6}

    def test_of_equals_the_lower_rate(self):
        grid = LossGrid(losses=("ms",))
        scores = scores_of(ms={1e-5: 0.1, 3e-5: 0.5, 1e-4: 0.5, 3e-4: 0.5})
        assert grid.chosen(scores) == {"pair": 3e-5}

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"losses": ("curricularface",)}, "unknown loss 'curricularface'; known: contrastive"),
            ({"rates": (2e-4,)}, "rates = 0.0002: take neighbours of the series 3e-06"),
        ],
    )
    def test_what_no_family_has_is_refused(self, asked, message):
        with pytest.raises(ValueError, match=message):
            LossGrid(**asked)


class TestKeptOfLosses:
    SEARCH = LossGrid(losses=("ms",))

    def run_of(self, trial, profile):
        return self.SEARCH.run_for(trial, profile)

    def test_a_search_goes_on_from_kept_runs_and_a_failed_one_counts_as_0(self, profile):
        kept, failed, missing = self.SEARCH.pending({})
        assert list(search.replay(self.SEARCH, profile).missing) == [kept, failed, missing]

        kept_runs.keep(self.run_of(kept, profile), profile, 0.5)
        kept_runs.fail(self.run_of(failed, profile), profile)
        on = search.replay(self.SEARCH, profile)
        assert list(on.missing) == [missing]
        assert on.scores.keys() == {kept, failed}
        table = search.table(self.SEARCH, on, profile).set_index("rate")
        assert 0.3 < table.at[kept.rate, "harmonic"] < 0.7
        assert table.at[failed.rate, "harmonic"] == 0
        assert table["unified"].isna().tolist() == [False, True]

    def test_a_run_is_held_out_and_at_the_rate_asked_for_whatever_the_profile_has(self, profile):
        tuned = replace(profile, recipes={"full/ms": {"lr": 0.5}})
        run = self.run_of(LossTrial("ms", 3e-5), tuned)
        assert run == self.run_of(LossTrial("ms", 3e-5), profile)
        assert (run.training.lr, run.data.holdout, run.method.name) == (3e-5, True, "full")

    def test_training_is_of_what_is_missing_and_may_fail(self, profile, monkeypatch):
        asked = {}

        def run_all(rows, at, may_fail):
            asked.update(rows)
            assert may_fail == rows, "a search has a use for what fails"
            assert at.seeds == (0,)

        monkeypatch.setattr(search, "run_all", run_all)
        progress = search.replay(self.SEARCH, profile)
        search.train(self.SEARCH, progress.missing, profile)
        assert list(asked) == ["ms, lr 3e-05", "ms, lr 0.0001", "ms, lr 0.0003"]


def test_the_block_for_the_profile_gives_each_loss_of_a_family_its_rate():
    grid = LossGrid(losses=("ms", "proxyanchor"), rates=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3))
    best_of = {"ms": 1e-4, "proxyanchor": 1e-3}
    scores = {trial: -abs(trial.rate - best_of[trial.loss]) for trial in grid.pending({})}
    block = search.yaml_recipes(grid.recipes(scores))
    read = config.profile("smoke", **yaml.safe_load(block))
    assert read.run("full", loss="npair").training.lr == 1e-4
    assert read.run("full", loss="softtriple").training.lr == 1e-3
    usual = config.profile("smoke")
    assert read.run("full", loss="cosface") == usual.run("full", loss="cosface")


def test_families_are_told_apart_by_vectors_of_classes():
    for family, members in search.FAMILIES.items():
        for name in members:
            learnt = list(losses.make(name, 3, 4).parameters())
            assert bool(learnt) == (family == "proxy"), name


def test_a_rate_for_a_loss_that_there_is_not_is_refused_before_anything_is_trained():
    profile = config.profile("smoke", recipes={"full/npairs": {"lr": 1e-4}})
    message = "profile 'smoke', recipes.full/npairs: unknown loss 'npairs'; known: contrastive"
    with pytest.raises(ValueError, match=message):
        study.run_all({"full": profile.run("full")}, profile)
