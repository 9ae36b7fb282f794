"""The search for each method's settings: what it asks for, given constructed scores."""

from dataclasses import replace

import kept_runs
import pandas as pd
import pytest
import yaml

from puma_study import store, tuning
from puma_study.tuning import Progress, Search, Setting, Trial
from pumalib import config, paths, training

ALONE = Search(("linear",), checks=())
SLOW, FAST = tuning.knob_of("linear").values


def curve(*numbers, value=SLOW, start=3e-5, row="linear", **trial):
    """Scores of a row at neighbouring rates from `start` on."""
    place = tuning.SERIES.index(start)
    rates = tuning.SERIES[place : place + len(numbers)]
    return {Trial(row, Setting(rate, value), **trial): one for rate, one in zip(rates, numbers)}


# Its best two are 1e-4 and 3e-4 at the knob's first value.
INSIDE = curve(0.2, 0.5, 0.4, 0.3) | curve(0.2, 0.3, 0.2, 0.1, value=FAST)


def seconds(first, second):
    """Second seeds of 1e-4 and 3e-4."""
    return {
        Trial("linear", Setting(1e-4, SLOW), seed=1): first,
        Trial("linear", Setting(3e-4, SLOW), seed=1): second,
    }


def run_to_the_end(search, score):
    """All scores of a search in which `score` says how each trial ends, round by round."""
    scores = {}
    rounds = []
    while asked := tuning.wanted(search, scores):
        assert not set(asked) & set(scores), "nothing is asked for twice"
        rounds.append(asked)
        scores |= {trial: score(trial) for trial in asked}
    return scores, rounds


class TestWanted:
    def test_first_all_rows_at_the_first_value_of_the_knob_then_their_best_two_at_the_second(self):
        search = Search(("puma", "full"))
        puma = [Trial("puma", Setting(rate, 0.1)) for rate in (3e-5, 1e-4, 3e-4, 1e-3)]
        full = [Trial("full", Setting(rate, 10.0)) for rate in (3e-5, 1e-4, 3e-4, 1e-3)]
        assert tuning.wanted(search, {}) == [*puma, *full]
        assert tuning.wanted(search, dict.fromkeys(puma, 0.5)) == full

        scores = dict(zip(puma, (0.1, 0.2, 0.4, 0.3))) | dict(zip(full, (0.1, 0.5, 0.4, 0.3)))
        second = [Trial("puma", Setting(rate, 1.0)) for rate in (3e-4, 1e-3)]
        second += [Trial("full", Setting(rate, 1.0)) for rate in (1e-4, 3e-4)]
        assert tuning.wanted(search, scores) == second

    def test_a_better_second_value_is_followed_until_its_best_is_inside(self):
        first = curve(0.2, 0.5, 0.4, 0.3)
        low = first | curve(0.6, 0.4, value=FAST, start=1e-4)
        assert tuning.wanted(ALONE, low) == [Trial("linear", Setting(3e-5, FAST))]
        inside = low | curve(0.3, value=FAST)
        assert tuning.wanted(ALONE, inside)[0] == Trial("linear", Setting(1e-4, FAST), seed=1)

    def test_an_optimum_inside_gets_two_second_seeds(self):
        assert tuning.wanted(ALONE, INSIDE) == list(seconds(0, 0))

    @pytest.mark.parametrize(
        ("numbers", "beyond"),
        [((0.5, 0.4, 0.3, 0.2), 1e-5), ((0.2, 0.3, 0.4, 0.5), 3e-3)],
    )
    def test_an_optimum_at_an_edge_leads_on_at_its_own_value_of_the_knob(self, numbers, beyond):
        at_second_value = curve(*numbers, value=FAST) | curve(0.1, 0.1, 0.1, 0.1)
        assert tuning.wanted(ALONE, at_second_value) == [Trial("linear", Setting(beyond, FAST))]

    def test_an_edge_is_followed_until_the_best_is_inside_or_the_series_ends(self):
        def rising(trial):
            return tuning.SERIES.index(trial.setting.rate) / 10 + (trial.setting.value == SLOW) / 20

        scores, rounds = run_to_the_end(ALONE, rising)
        followed = [asked[0].setting.rate for asked in rounds[2:4]]
        assert followed == [3e-3, 1e-2]
        assert tuning.chosen(ALONE, scores) == {"linear": Setting(1e-2, SLOW)}
        assert len(scores) == 4 + 2 + 2 + 2

    def test_a_second_seed_that_moves_the_best_to_an_edge_leads_on_again(self):
        first = curve(0.49, 0.5, 0.4, 0.3) | curve(0.1, 0.1, 0.1, 0.1, value=FAST)
        edge, middle = Setting(3e-5, SLOW), Setting(1e-4, SLOW)
        both = first | {Trial("linear", edge, 1): 0.6, Trial("linear", middle, 1): 0.4}
        assert tuning.wanted(ALONE, both) == [Trial("linear", Setting(1e-5, SLOW))]
        assert tuning.chosen(ALONE, both) == {}

        worse = both | {Trial("linear", Setting(1e-5, SLOW)): 0.3}
        assert tuning.wanted(ALONE, worse) == []
        assert tuning.chosen(ALONE, worse) == {"linear": edge}

        better = both | {Trial("linear", Setting(1e-5, SLOW)): 0.55}
        assert tuning.wanted(ALONE, better) == [Trial("linear", Setting(3e-6, SLOW))]
        inside = better | {Trial("linear", Setting(3e-6, SLOW)): 0.3}
        assert tuning.wanted(ALONE, inside) == [Trial("linear", Setting(1e-5, SLOW), seed=1)]

    def test_a_loss_that_is_not_finite_is_the_worst_score(self):
        first = curve(0.1, 0.2, 0.3, 0.0) | curve(0.0, 0.0, 0.0, 0.0, value=FAST)
        asked = tuning.wanted(ALONE, first)
        assert [trial.setting.rate for trial in asked] == [3e-4, 1e-4]

    def test_every_row_has_the_same_first_trials_and_two_seconds(self):
        search = Search(checks=())
        scores, _ = run_to_the_end(search, lambda trial: 0.5 - abs(trial.setting.rate - 2e-4))
        for row in tuning.METHODS:
            own = [trial for trial in scores if trial.row == row]
            assert sum(trial.seed == 0 for trial in own) == 6
            assert sum(trial.seed == 1 for trial in own) == 2


class TestChosen:
    def test_the_higher_mean_of_two_seeds_not_the_better_first(self):
        assert tuning.chosen(ALONE, INSIDE | seconds(0.3, 0.5))["linear"].rate == 3e-4
        assert tuning.chosen(ALONE, INSIDE | seconds(0.4, 0.45))["linear"].rate == 1e-4

    def test_of_equals_the_lower_rate(self):
        equal = curve(0.2, 0.5, 0.5, 0.3) | curve(0.1, 0.5, 0.5, 0.1, value=FAST)
        asked = tuning.wanted(ALONE, equal)
        assert [trial.setting for trial in asked] == [Setting(1e-4, SLOW), Setting(1e-4, FAST)]
        settled = equal | dict.fromkeys(asked, 0.5)
        assert tuning.chosen(ALONE, settled) == {"linear": Setting(1e-4, SLOW)}

    def test_nothing_before_the_search_has_ended(self):
        assert tuning.chosen(ALONE, {}) == {}
        assert tuning.chosen(ALONE, INSIDE) == {}


def at_best(rate, times=1):
    """Scores that are best at a rate, of trials at one length, and at another rate longer."""

    def score(trial):
        best = rate
        if trial.times > 1:
            best = times
        distance = tuning.SERIES.index(trial.setting.rate) - tuning.SERIES.index(best)
        is_second = trial.setting.value == tuning.knob_of(trial.row).values[1]
        return 0.6 - 0.05 * abs(distance) - 0.01 * is_second

    return score


class TestChecks:
    ROWS = ("linear", "full", "puma")

    def test_length_is_asked_of_full_and_puma_where_it_moves_no_rate(self):
        search = Search(self.ROWS, checks=("length",))
        scores, rounds = run_to_the_end(search, at_best(1e-4, 1e-4))
        longer = [trial for trial in rounds[-1] if trial.times == 2]
        assert {trial.row for trial in longer} == {"full", "puma"}
        assert {trial.setting.rate for trial in longer} == {3e-5, 1e-4, 3e-4}
        assert len(longer) == len(rounds[-1]) == 6
        assert tuning.length_moves(search, scores) == []

    def test_and_of_all_rows_where_it_does_and_they_take_its_rate_from_inside(self):
        search = Search(self.ROWS, checks=("length",))
        scores, rounds = run_to_the_end(search, at_best(1e-4, 1e-3))
        assert tuning.length_moves(search, scores) == ["full", "puma"]
        assert {trial.row for trial in rounds[-1]} == {"linear"}
        chosen = tuning.chosen(search, scores)
        assert {setting.rate for setting in chosen.values()} == {1e-3}
        tried = {trial.setting.rate for trial in scores if trial.times == 2}
        assert max(tried) == 3e-3, "beyond the neighbours, until the best is inside"

    def test_mirroring_is_the_mean_of_four_at_their_best(self):
        search = Search(checks=("mirroring",))
        usual = at_best(1e-4)

        def score(trial):
            extra = {"full": 0.03, "puma": 0.01}.get(trial.row, -0.01)
            return usual(trial) + trial.turned * extra

        scores, rounds = run_to_the_end(search, score)
        assert [trial.row for trial in rounds[-1]] == ["full", "puma", "lora", "linear"]
        assert all(trial.turned and trial.setting.rate == 1e-4 for trial in rounds[-1])
        gain = (0.03 + 0.01 - 0.01 - 0.01) / 4
        assert tuning.mirroring_gain(search, scores) == pytest.approx(gain)

    @pytest.mark.parametrize(("last", "lengths"), [(0.004, {2, 4, 8}), (0.006, {2, 4, 8, 16})])
    def test_convergence_doubles_again_where_the_last_doubling_still_gains(self, last, lengths):
        search = Search(("full",), checks=("convergence",))
        usual = at_best(1e-4, 1e-4)
        gained = {1: 0.0, 2: 0.1, 4: 0.15, 8: 0.15 + last, 16: 0.16}
        scores, _ = run_to_the_end(search, lambda trial: usual(trial) + gained[trial.times])
        longer = [trial for trial in scores if trial.times > 1]
        assert {trial.times for trial in longer} == lengths
        assert {trial.seed for trial in longer} == {0, 1}
        gains = tuning.doublings("full", search, scores)
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
        Search(**given)


class TestRuns:
    def test_a_trial_is_the_run_that_the_command_trains(self):
        of_lr = config.profile("photos-8", lr=3e-4, holdout=True)
        scaled = Trial("puma", Setting(3e-4, 1.0))
        profile = config.profile("photos-8")
        assert tuning.run_for(scaled, profile) == of_lr.run("puma", seed=0, adapter_scale=1.0)
        default = Trial("puma", Setting(3e-4, 0.1), seed=1)
        assert tuning.run_for(default, profile) == of_lr.run("puma", seed=1)
        head = config.profile("photos-8", lr=1e-4, holdout=True, new_lr_factor=1.0)
        full = Trial("full", Setting(1e-4, 1.0))
        assert tuning.run_for(full, profile) == head.run("full", seed=0)

    def test_checks_change_epochs_and_mirroring_alone(self):
        profile = config.profile("photos-8")
        trial = Trial("lora", Setting(1e-3, 4.0))
        usual = tuning.run_for(trial, profile)
        turned = tuning.run_for(replace(trial, turned=True), profile)
        assert turned == replace(usual, data=replace(usual.data, flip=False))
        longer = tuning.run_for(replace(trial, times=2), profile)
        assert longer.training.epochs == 16
        assert replace(longer, training=usual.training) == usual

    def test_every_knob_is_a_setting_and_its_first_value_the_default(self):
        assert {tuning.knob_of(row).name for row in tuning.METHODS} == {
            "adapter_scale",
            "lora_scale",
            "new_lr_factor",
            "loss_lr_factor",
        }
        for row in tuning.METHODS:
            knob = tuning.knob_of(row)
            run = config.Profile("x").run(row)
            default = vars(run.method) | vars(run.training)
            assert default[knob.name] == knob.values[0]


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """A profile of kept runs at two rates, of which one is missing."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return kept_runs.PROFILE


def keep(trial, profile, rate):
    kept_runs.keep(tuning.run_for(trial, profile), profile, rate)


def fail(trial, profile):
    kept_runs.fail(tuning.run_for(trial, profile), profile)


class TestReplay:
    SEARCH = Search(("linear",), (1e-4, 3e-4), checks=())

    def test_it_goes_on_from_what_is_kept_and_names_what_is_missing(self, profile):
        grid = tuning.wanted(self.SEARCH, {})
        for trial in grid[:-1]:
            keep(trial, profile, 0.5)
        keep(Trial("linear", Setting(1e-2, SLOW)), profile, 0.9)
        progress = tuning.replay(self.SEARCH, profile)
        assert list(progress.scores) == grid[:-1], "what the rule does not ask for does not count"
        name = training.run_name(tuning.run_for(grid[-1], profile))
        assert progress.missing == {grid[-1]: name}

        fail(grid[-1], profile)
        lost = tuning.replay(self.SEARCH, profile)
        assert lost.scores[grid[-1]] == 0
        assert lost.missing
        table = tuning.table(self.SEARCH, lost, profile)
        assert table.set_index("run").at[name, "harmonic"] == 0
        assert pd.isna(table.set_index("run").at[name, "unified"])

    def test_rounds_train_until_nothing_is_wanted(self, profile, monkeypatch):
        wrecked = tuning.wanted(self.SEARCH, {})[1]

        def run_all(rows, asked, may_fail):
            assert may_fail == rows, "a search has a use for what fails"
            for run in rows.values():
                run = replace(run, seed=asked.seeds[0])
                if run == tuning.run_for(wrecked, profile):
                    fail(wrecked, profile)
                    continue
                setting = Setting(run.training.lr, run.training.loss_lr_factor)
                keep(Trial("linear", setting, run.seed), profile, 0.5)

        monkeypatch.setattr(tuning, "run_all", run_all)
        progress = tuning.replay(self.SEARCH, profile)
        while progress.missing:
            tuning.train(progress.missing, profile)
            progress = tuning.replay(self.SEARCH, profile)
        assert progress.scores[wrecked] == 0
        assert set(tuning.chosen(self.SEARCH, progress.scores)) == {"linear"}


def constructed(best):
    """The table of a search of one row whose best rate is `best`."""
    scores, _ = run_to_the_end(ALONE, at_best(best))
    names = {trial: str(number) for number, trial in enumerate(scores)}
    return tuning.table(ALONE, Progress(scores, names, {}), kept_runs.PROFILE)


class TestTable:
    def test_it_says_which_trials_are_chosen(self, profile):
        table = constructed(3e-4)
        assert list(table.columns) == tuning.COLUMNS
        chosen = table[table["chosen"]]
        assert chosen[["rate", "value", "seed"]].to_numpy().tolist() == [
            [3e-4, SLOW, 0],
            [3e-4, SLOW, 1],
        ]
        assert tuning.at_edge(table) == []

    def test_a_run_has_its_loss_on_training_images_where_it_was_kept(self, profile):
        search = Search(("linear",), (1e-4, 3e-4), checks=())
        without, has = tuning.wanted(search, {})[:2]
        keep(without, profile, 0.5)
        kept_runs.keep(tuning.run_for(has, profile), profile, 0.5, open_loss=1.25)
        table = tuning.table(search, tuning.replay(search, profile), profile)
        losses = table.set_index("rate")["open_loss"]
        assert pd.isna(losses[without.setting.rate])
        assert losses[has.setting.rate] == 1.25

    def test_an_optimum_at_an_edge_is_found(self, profile):
        table = constructed(3e-4)
        lower = table[(table["rate"] >= 3e-4) | (table["value"] != SLOW)]
        assert tuning.at_edge(lower) == ["linear"]
        higher = table[(table["rate"] <= 3e-4) | (table["value"] != SLOW)]
        assert tuning.at_edge(higher) == ["linear"]
        assert tuning.at_edge(constructed(1e-2)) == ["linear"], "the series ends there"

    def test_a_profile_can_read_the_chosen_settings(self):
        block = tuning.yaml_tuned({"puma": Setting(3e-5, 1.0), "linear": Setting(1e-3, 1e4)})
        assert yaml.safe_load(block) == {
            "recipes": {
                "puma": {"lr": 3e-5, "adapter_scale": 1},
                "linear": {"lr": 1e-3, "loss_lr_factor": 10000},
            }
        }


TUNED = sorted((paths.ROOT / "results").glob("*/tuning.csv"))


@pytest.mark.skipif(not TUNED, reason="no tuning.csv is kept yet")
@pytest.mark.parametrize("file", TUNED, ids=lambda file: file.parent.name)
def test_no_kept_optimum_is_at_an_edge_and_numbers_are_of_their_runs(file, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", paths.ROOT / "results")
    table = pd.read_csv(file)
    assert tuning.at_edge(table) == []
    kept = store.read(file.parent.name)
    finite = table.dropna(subset=["unified"])
    assert len(finite)
    for line in finite.itertuples():
        accuracies = kept[line.run].accuracies
        assert accuracies["harmonic"] == pytest.approx(line.harmonic, abs=1e-5), line.run
