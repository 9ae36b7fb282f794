"""The rate of a family of losses: what the search asks for, given constructed scores."""

from dataclasses import replace

import kept_runs
import pytest
import yaml

import puma_study as study
from puma_study import loss_rates
from puma_study.loss_rates import Search, Trial
from pumalib import config, losses, paths

PAIRS = Search(losses=("ms", "npair"))
START = {1e-5: 0.0, 3e-5: 0.3, 1e-4: 0.5, 3e-4: 0.4}


def scores_of(**by_loss):
    """Scores of losses by rate."""
    found = {}
    for loss, by_rate in by_loss.items():
        found |= {Trial(loss, rate): score for rate, score in by_rate.items()}
    return found


class TestWanted:
    def test_first_every_loss_at_every_rate(self):
        asked = loss_rates.wanted(PAIRS, {})
        of_ms = [Trial("ms", rate) for rate in (3e-5, 1e-4, 3e-4)]
        assert asked[:3] == of_ms
        assert len(asked) == 6
        known = dict.fromkeys(of_ms, 0.5)
        assert {trial.loss for trial in loss_rates.wanted(PAIRS, known)} == {"npair"}

    def test_nothing_where_the_mean_is_best_inside_though_a_loss_is_best_at_an_edge(self):
        inside = scores_of(
            ms={3e-5: 0.1, 1e-4: 0.6, 3e-4: 0.2}, npair={3e-5: 0.3, 1e-4: 0.2, 3e-4: 0.1}
        )
        assert loss_rates.wanted(PAIRS, inside) == []
        assert loss_rates.chosen(PAIRS, inside) == {"pair": 1e-4}

    def test_an_edge_is_followed_by_all_losses_of_the_family_and_no_other(self):
        search = Search(losses=("ms", "npair", "proxyanchor"))
        scores = scores_of(
            ms={3e-5: 0.6, 1e-4: 0.5, 3e-4: 0.2},
            npair={3e-5: 0.3, 1e-4: 0.2, 3e-4: 0.0},
            proxyanchor={3e-5: 0.3, 1e-4: 0.5, 3e-4: 0.4},
        )
        assert loss_rates.wanted(search, scores) == [Trial("npair", 1e-5), Trial("ms", 1e-5)]
        assert loss_rates.chosen(search, scores) == {}, "not before the search has ended"
        scores |= {Trial("ms", 1e-5): 0.1, Trial("npair", 1e-5): 0.1}
        assert loss_rates.chosen(search, scores) == {"pair": 3e-5, "proxy": 1e-4}

    def test_an_edge_is_followed_to_the_end_of_the_series(self):
        search = Search(losses=("ms",))
        scores = {}
        while asked := loss_rates.wanted(search, scores):
            scores |= {trial: -trial.rate for trial in asked}
        assert loss_rates.chosen(search, scores) == {"pair": 3e-6}

    def test_of_equals_the_lower_rate(self):
        search = Search(losses=("ms",))
        scores = scores_of(ms={1e-5: 0.1, 3e-5: 0.5, 1e-4: 0.5, 3e-4: 0.5})
        assert loss_rates.chosen(search, scores) == {"pair": 3e-5}

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"losses": ("curricularface",)}, "unknown loss 'curricularface'; known: contrastive"),
            ({"rates": (2e-4,)}, "rates = 0.0002: take neighbours of the series 3e-06"),
        ],
    )
    def test_what_no_family_has_is_refused(self, asked, message):
        with pytest.raises(ValueError, match=message):
            Search(**asked)


class TestKept:
    SEARCH = Search(losses=("ms",))

    @pytest.fixture
    def profile(self, tmp_path, monkeypatch):
        monkeypatch.setattr(paths, "RESULTS", tmp_path)
        return kept_runs.PROFILE

    def run_of(self, trial, profile):
        return loss_rates.run_for(trial, self.SEARCH, profile)

    def test_a_search_goes_on_from_kept_runs_and_a_failed_one_counts_as_0(self, profile):
        kept, failed, missing = loss_rates.wanted(self.SEARCH, {})
        assert list(loss_rates.replay(self.SEARCH, profile).missing) == [kept, failed, missing]

        kept_runs.keep(self.run_of(kept, profile), profile, 0.5)
        kept_runs.fail(self.run_of(failed, profile), profile)
        on = loss_rates.replay(self.SEARCH, profile)
        assert list(on.missing) == [missing]
        assert on.scores.keys() == {kept, failed}
        table = loss_rates.table(self.SEARCH, on, profile).set_index("rate")
        assert 0.3 < table.at[kept.rate, "harmonic"] < 0.7
        assert table.at[failed.rate, "harmonic"] == 0
        assert table["unified"].isna().tolist() == [False, True]

    def test_a_run_is_held_out_and_at_the_rate_asked_for_whatever_the_profile_has(self, profile):
        tuned = replace(profile, recipes={"full/ms": {"lr": 0.5}})
        run = self.run_of(Trial("ms", 3e-5), tuned)
        assert run == self.run_of(Trial("ms", 3e-5), profile)
        assert (run.training.lr, run.data.holdout, run.method.name) == (3e-5, True, "full")

    def test_training_is_of_what_is_missing_and_may_fail(self, profile, monkeypatch):
        asked = {}

        def run_all(rows, at, may_fail):
            asked.update(rows)
            assert may_fail == rows, "a search has a use for what fails"
            assert at.seeds == (0,)

        monkeypatch.setattr(loss_rates, "run_all", run_all)
        progress = loss_rates.replay(self.SEARCH, profile)
        loss_rates.train(self.SEARCH, progress, profile)
        assert list(asked) == ["ms, lr 3e-05", "ms, lr 0.0001", "ms, lr 0.0003"]


def test_the_block_for_the_profile_gives_each_loss_of_a_family_its_rate():
    block = loss_rates.yaml_tuned_losses("full", {"pair": 3e-5, "proxy": 1e-3})
    read = config.profile("smoke", **yaml.safe_load(block))
    assert read.run("full", loss="npair").training.lr == 3e-5
    assert read.run("full", loss="softtriple").training.lr == 1e-3
    usual = config.profile("smoke")
    assert read.run("full", loss="cosface") == usual.run("full", loss="cosface")


def test_families_are_told_apart_by_vectors_of_classes():
    for family, members in loss_rates.FAMILIES.items():
        for name in members:
            learnt = list(losses.make(name, 3, 4).parameters())
            assert bool(learnt) == (family == "proxy"), name


def test_a_rate_for_a_loss_that_there_is_not_is_refused_before_anything_is_trained():
    profile = config.profile("smoke", recipes={"full/npairs": {"lr": 1e-4}})
    message = "profile 'smoke', recipes.full/npairs: unknown loss 'npairs'; known: contrastive"
    with pytest.raises(ValueError, match=message):
        study.run_all({"full": profile.run("full")}, profile)
