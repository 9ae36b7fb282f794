"""The survey's statements as data, and the measures that some of them are judged by."""

import ast
import math
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from puma_study import claims, measures, verdicts
from puma_study.claims import Claim, Judgement, Statement
from puma_study.contrasts import NotTestable
from pumalib import losses, paths


def written(folder, name, table):
    (folder / "test").mkdir(exist_ok=True)
    table.to_csv(folder / "test" / f"{name}.csv", index=False)


def costs(turns=6, noise=0.01):
    """Times that grow as the cube, as the first power, and not at all."""
    rng = np.random.default_rng(0)
    powers = {"plain triplets": 3.0, "proxynca": 1.0, "proxyanchor": 0.0}
    lines = []
    for varied in ("images per class", "classes"):
        for loss, power in powers.items():
            for turn in range(1, turns + 1):
                for x in (4, 8, 16, 32):
                    time = x**power * math.exp(noise * rng.normal())
                    lines.append((varied, loss, x, turn, time))
    return pd.DataFrame(lines, columns=["varied", "loss", "x", "turn", "milliseconds"])


def test_every_statement_is_of_the_survey_and_can_be_read():
    found = claims.read_claims(claims.SURVEY)
    names = [claim.name for claim in found]
    assert len(found) > 25
    assert len(set(names)) == len(names)
    assert all(claim.quote and claim.section and claim.text for claim in found)
    assert all(bool(claim.above) != bool(claim.untestable) for claim in found)
    tables = {one.table for claim in found for one in claim.above}
    assert tables == {
        "survey_losses",
        "survey_losses_cost",
        "survey_losses_gradients",
        "survey_losses_constraint",
        "survey_losses_collapse",
        "language_guidance_cost",
        "cost_on_faces_images",
        "loss_functions_sensitivity",
        "loss_sensitivity",
        "language_guidance",
        "direction_regularisation",
        "several_looks",
    }


def test_every_setting_by_full_fine_tuning_is_judged_at_all_its_values():
    """... under the names that 29_loss_sensitivity gives to its rows."""
    notebook = nbformat.read(paths.NOTEBOOKS / "29_loss_sensitivity.ipynb", as_version=4)
    (source,) = [cell.source for cell in notebook.cells if "rows" in cell.metadata.get("tags", [])]
    # Of names given twice the first: the second is that of `smoke`.
    assigned = [one for one in ast.parse(source).body if isinstance(one, ast.Assign)]
    literals = {one.targets[0].id: one.value for one in reversed(assigned)}
    grid = ast.literal_eval(literals["GRID"])
    survey = ast.literal_eval(literals["SURVEY"])

    expected = set()
    for (name, key), values in grid.items():
        default = losses.defaults(survey[name][0])[key]
        others = [f"full, {name} ({key} = {value:g})" for value in values if value != default]
        expected.add((f"full, {name} ({key} = {default:g})", *others))
    judged = set()
    for claim in claims.read_claims(claims.SURVEY):
        for one in claim.above:
            if one.table == "loss_sensitivity":
                assert one.apart == 1
                judged.add((*one.rivals, *one.winners))
    assert judged == expected


def test_a_claim_has_statements_or_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    (tmp_path / "bad.yaml").write_text("[{name: empty, section: '1', text: x}]")
    with pytest.raises(ValueError, match=r"bad.yaml, empty: give statements `above`"):
        claims.read_claims("bad.yaml")


def test_an_exponent_is_the_slope_of_the_upper_half():
    assert measures.exponent(pd.Series({1: 9.0, 2: 9.0, 4: 16.0, 8: 128.0})) == pytest.approx(3)
    # Three of five sizes: a line through (0, 0), (1, 1), (2, 4) in log 2 has the slope 2.
    times = pd.Series({1: 5.0, 2: 5.0, 4: 1.0, 8: 2.0, 16: 16.0})
    assert measures.exponent(times) == pytest.approx(2)


def test_repetitions_are_compared_in_pairs_as_by_scipy():
    lines = [("a", "c", 1, 1.0), ("a", "c", 2, 3.0), ("a", "c", 3, 8.0), ("a", "d", 1, 1.0)]
    lines += [("b", "c", 1, 0.5), ("b", "c", 2, 1.0), ("b", "c", 3, 7.0), ("b", "c", 4, 99.0)]
    table = pd.DataFrame(lines, columns=measures.COLUMNS)
    gain = measures.difference(table, "a", "b").loc["c"]
    expected = stats.ttest_rel([1.0, 3.0, 8.0], [0.5, 1.0, 7.0], alternative="greater")
    assert gain["value"] == pytest.approx(3.5 / 3)
    assert gain["p_greater"] == pytest.approx(expected.pvalue)
    assert gain["p_greater"] + gain["p_less"] == pytest.approx(1)
    assert expected.confidence_interval().low > gain["low"], "that is of one side"

    bound = measures.difference(table, "a", "2")
    alone = stats.ttest_1samp([1.0, 3.0, 8.0], 2)
    assert bound.at["c", "low"] == pytest.approx(alone.confidence_interval().low - 2)
    # One repetition has no p-value.
    assert bound.at["d", "value"] == -1
    assert np.isnan(bound.at["d", "p_greater"])
    with pytest.raises(NotTestable, match="a and e were not measured"):
        measures.difference(table, "a", "e")


def test_the_first_and_last_step_of_each_seed_are_rows():
    lines = [("x", seed, step, 0.1 * step + seed) for seed in (0, 1) for step in (0, 5, 10)]
    table = measures.of_gradients(pd.DataFrame(lines, columns=["loss", "seed", "step", "picked"]))
    assert measures.rows(table) == ["x, start", "x, end"]
    assert table[table["row"] == "x, end"]["value"].tolist() == [1.0, 2.0]


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    train = pd.DataFrame({"dataset": ["sop"] * 3})
    monkeypatch.setattr(claims.data, "load", lambda data: SimpleNamespace(train=train))
    return SimpleNamespace(name="test", data=None, large=None)


def test_costs_are_judged_by_their_exponents(profile, tmp_path):
    written(tmp_path, "survey_losses_cost", costs())
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    cubic = card.loc["triplets-cubic"]
    assert cubic["here"] == "supported"
    assert cubic["rows_run"] == "plain triplets, 2.5, 3.5"
    assert "exponent, images per class: +0.5" in cubic["why"], "not in points"
    # Two of its rows have no times.
    linear = card.loc["proxies-linear-in-images"]
    assert linear["here"] == "undecided"
    assert linear["why"].endswith("2 of 4 pairs of rows could be compared")

    slow = costs()
    slow["loss"] = slow["loss"].replace(
        {"plain triplets": "proxynca", "proxynca": "plain triplets"}
    )
    written(tmp_path, "survey_losses_cost", slow)
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    assert card.at["triplets-cubic", "here"] == "contradicted"


# ---- classes that are wide before training


def shares(wide, narrow, seeds=6):
    """Four classes, two of them wide, with their violated triplets in each seed."""
    lines = []
    for seed in range(seeds):
        noise = 0.001 * seed
        classes = [(2, wide), (3, wide), (0.5, narrow), (0.9, narrow)]
        for place, (width, share) in enumerate(classes):
            lines.append((seed, place, width, share + noise * (place + 1)))
    return pd.DataFrame(lines, columns=["seed", "class", "width", "violated"])


def test_classes_are_wide_above_1_or_above_the_median():
    assert measures.is_wide(pd.Series([0.5, 0.9, 1.5])).tolist() == [False, False, True]
    # One of ten is a tenth, one of eleven is less.
    ten = pd.Series([1.5, *np.linspace(0.1, 0.9, 9)])
    assert measures.is_wide(ten).tolist() == [True, *[False] * 9]
    eleven = pd.Series([1.5, *np.linspace(0.1, 1.0, 10)])
    # The median is 0.6.
    assert measures.is_wide(eleven).tolist() == [True, *[False] * 6, *[True] * 4]
    assert measures.is_wide(pd.Series([2.0, 3.0, 4.0])).tolist() == [False, False, True]


def test_violated_triplets_are_means_over_the_classes_of_a_seed():
    table = measures.of_constraint(shares(0.4, 0.1))
    values = table.set_index(["row", "repetition"])["value"]
    assert measures.rows(table) == ["wide classes", "narrow classes"]
    # Of seed 2: 0.4 + 0.002 and 0.4 + 0.004; 0.1 + 0.006 and 0.1 + 0.008.
    assert values["wide classes", 2] == pytest.approx(0.403)
    assert values["narrow classes", 2] == pytest.approx(0.107)


@pytest.mark.parametrize(
    ("wide", "narrow", "verdict"),
    [(0.4, 0.1, "supported"), (0.1, 0.4, "contradicted"), (0.105, 0.1, "undecided")],
)
def test_wide_classes_violate_more_or_less(profile, tmp_path, wide, narrow, verdict):
    written(tmp_path, "survey_losses_constraint", shares(wide, narrow))
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    one = card.loc["triplet-constraint"]
    assert one["here"] == verdict
    assert one["rows_run"] == "wide classes, narrow classes"


def test_one_seed_of_violated_triplets_decides_nothing(profile, tmp_path):
    written(tmp_path, "survey_losses_constraint", shares(0.4, 0.1, seeds=1))
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    assert card.at["triplet-constraint", "here"] == "not testable"
    assert card.at["triplet-constraint", "why"].endswith(": one seed")


# ---- what ends below the frozen backbone


def last_cosines(**rows):
    """A line per row and seed: of each row whether it ends below, and its cosines."""
    lines = []
    for row, (below, cosines) in rows.items():
        for seed, cosine in enumerate(cosines):
            lines.append((row, seed, below, cosine))
    return pd.DataFrame(lines, columns=["row", "seed", "below", "cosine"])


ONE_POINT = [0.992, 0.994, 0.996, 0.993]
SPREAD = [0.102, 0.104, 0.106, 0.103]
UNSEEN = [np.nan] * 4


@pytest.mark.parametrize(
    ("rows", "verdict", "why"),
    [
        # What ends above the frozen backbone is not asked, nor what logged nothing.
        (
            {"a": (True, ONE_POINT), "b": (False, SPREAD), "c": (True, UNSEEN)},
            "supported",
            "below frozen, a over 0.9, cosine: +0.09",
        ),
        (
            {"a": (True, ONE_POINT), "b": (True, SPREAD)},
            "contradicted",
            "below frozen, b over 0.9, cosine: -0.80",
        ),
        ({"b": (False, SPREAD)}, "not testable", "no row 'below frozen, *'"),
        (
            {"a": (True, UNSEEN)},
            "not testable",
            "below frozen, a and 0.9 were not measured in the same columns",
        ),
    ],
)
def test_what_ends_below_the_frozen_backbone_is_one_point(profile, tmp_path, rows, verdict, why):
    written(tmp_path, "survey_losses_collapse", last_cosines(**rows))
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    one = card.loc["collapse-signature"]
    assert one["here"] == verdict
    assert one["why"].startswith(why)


# ---- what guidance costs


def steps_timed(alone, guided, network, turns=6):
    """Milliseconds, which wander by a hundredth from turn to turn."""
    lines = []
    for turn in range(1, turns + 1):
        for name, time in {"alone": alone, "guided": guided, "network": network}.items():
            # Else the steps of a turn would move together.
            wander = 1 + 0.01 * ((turn * len(name)) % 5 - 2)
            lines.append((name, turn, time * wander))
    return pd.DataFrame(lines, columns=["step", "turn", "milliseconds"])


def test_guidance_is_a_share_of_a_training_step():
    times = pd.DataFrame(
        {"step": ["alone", "guided", "network"], "turn": [1, 1, 1], "milliseconds": [2.0, 5, 28]}
    )
    table = measures.of_guidance(times).set_index(["row", "column"])
    # 3 ms beside 28 + 2.
    assert table.at[("guidance", "share of a training step"), "value"] == pytest.approx(0.1)
    assert table.at[("guided", "log ms"), "value"] == pytest.approx(math.log(5))
    assert (table["repetition"] == 1).all()


@pytest.mark.parametrize(
    ("times", "longer", "counts"),
    [
        ((1.0, 2.0, 100.0), "supported", "contradicted"),
        ((1.0, 30.0, 100.0), "supported", "supported"),
        ((2.0, 1.0, 100.0), "contradicted", "contradicted"),
    ],
)
def test_guidance_takes_time_and_how_much_of_it(profile, tmp_path, times, longer, counts):
    written(tmp_path, "language_guidance_cost", steps_timed(*times))
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    assert card.at["language-overhead", "here"] == longer
    assert card.at["language-overhead-counts", "here"] == counts
    assert card.at["language-overhead-counts", "rows_run"] == "guidance, 0.1"


# ---- images until a target


def images_until(random, batchhard, semihard):
    """Images that each seed needed."""
    lines = []
    rows = {
        "triplet, random": random,
        "triplet, batch-hard": batchhard,
        "triplet, semi-hard": semihard,
    }
    for loss, images in rows.items():
        lines += [(loss, seed, count, count < 3200) for seed, count in enumerate(images)]
    return pd.DataFrame(lines, columns=["loss", "seed", "images", "reached"])


def test_images_are_compared_as_ratios():
    table = measures.of_images(images_until([800, 3200], [400, 400], [400, 400]))
    gain = measures.difference(table, "triplet, random", "triplet, batch-hard").loc["log images"]
    # A ratio of 2, and of 8 or more: of a seed that never arrived.
    assert gain["value"] == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        # A draw that never arrives counts as the images that it saw.
        (([3200] * 6, [800, 820, 840, 810, 830, 790], [900, 920, 940, 910, 930, 890]), "supported"),
        # One of the two is slower.
        (
            ([800, 820, 840, 810, 830, 790], [400, 420, 440, 410, 430, 390], [3200] * 6),
            "contradicted",
        ),
        # None arrives: no difference is seen, and none is claimed.
        (([3200] * 6, [3200] * 6, [3200] * 6), "undecided"),
    ],
)
def test_hard_mining_needs_fewer_images(profile, tmp_path, counts, verdict):
    written(tmp_path, "cost_on_faces_images", images_until(*counts))
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    assert card.at["hard-mining-faster", "here"] == verdict
    assert card.at["hard-mining-unstable", "here"] == "not testable"


def test_what_cannot_be_judged_says_why(profile):
    card = verdicts.scorecard(profile, file=claims.SURVEY)
    assert (card["here"] == "not testable").all()
    assert (card["print"] == "not printed").all()
    assert not card["could_support"].any()
    assert card.at["multimodal", "why"].startswith("nothing here has a second modality")
    said = "there is no survey_losses.csv: the notebook of that name writes it"
    assert card.at["mining-helps", "why"] == said


def compared(values, error, apart):
    """A statement's comparisons with these values, in points, of which one should lie `apart`."""
    lines = []
    for value in values:
        numbers = {"value": value, "low": value - 2 * error, "high": value + 2 * error}
        numbers |= {"p_greater": 0.5, "p_less": 0.5, "error": error, "dof": 30.0}
        lines.append({"row": "changed", "rival": "default", "column": "harmonic", **numbers})
    return pd.DataFrame(lines).assign(statement=0, share=1.0, apart=apart, why_not="")


@pytest.mark.parametrize(
    ("values", "error", "supports", "contradicts"),
    [
        # One of them is 4 points away, to either side: by Bonferroni 2 sides of 2 comparisons.
        ((0.0, 5.0), 1.0, 4 * stats.t.sf(4, 30), None),
        ((0.0, -5.0), 1.0, 4 * stats.t.sf(4, 30), None),
        # All are nearer than a point: the worst decides.
        ((0.0, 0.5), 0.1, None, stats.t.cdf(-5, 30)),
    ],
)
def test_sensitive_is_farther_than_so_many_points(values, error, supports, contradicts):
    # Against it is one test, whatever the number of comparisons.
    judgement = claims.judge(compared(values, error, apart=1.0))
    if supports is not None:
        assert judgement.supports == pytest.approx(supports)
        assert judgement.contradicts > 0.9
    if contradicts is not None:
        assert judgement.contradicts == pytest.approx(contradicts)
        assert judgement.supports == 1


@pytest.mark.parametrize(
    ("apart", "sides"),
    [
        # Intervals of 2 points to each side.  Above 0 are all but -4; wholly 3 and 5.
        (np.nan, (3, 2, 3)),
        # Farther than a point, either way, are all but 0.5; wholly 5 and -4.
        (1.0, (3, 2, 4)),
    ],
)
def test_the_side_of_sensitive_is_on_both_sides(apart, sides):
    table = compared((0.5, 3.0, 5.0, -4.0), error=1.0, apart=apart).assign(pair="a", missing="")
    rests = verdicts._rests_on(table, 1, "", 0.05)
    assert tuple(rests[key] for key in ("on_its_side", "side_low", "side_high")) == sides


def test_a_frozen_row_of_other_queries_says_nothing_of_a_collapse(monkeypatch):
    runs = claims.Kept("test", {2: pd.Series({"a": ["1"], "frozen": ["2"]})})
    other = "they were tested on other queries"

    def refused(*names):
        raise NotTestable(other)

    monkeypatch.setattr(claims.Kept, "_difference", refused)
    assert not runs.ends_below_frozen(2, "a")


def test_all_statements_must_hold_each_for_its_share_of_comparisons():
    lines = [
        # Two of three must be above, so that one may fail.
        (0, 0.6, 1.0, 0.6, 0.4),
        (0, 0.6, -9.0, 0.99, 0.01),
        (0, 0.6, -8.0, 0.98, 0.02),
        (1, 1.0, 5.0, 0.001, 0.999),
    ]
    names = ["statement", "share", "value", "p_greater", "p_less"]
    table = pd.DataFrame(lines, columns=names).assign(apart=np.nan, why_not="")
    judgement = claims.judge(table)
    assert judgement.decides["value"] == -8, "the weakest of the two that must be above"
    assert judgement.supports == 1, "2 x 0.98"
    # Two below are too many: the second smallest, by Bonferroni over four comparisons.
    assert judgement.contradicts == pytest.approx(4 * 0.02)

    table.loc[2, "why_not"] = "one seed"
    without = claims.judge(table)
    # Of two comparisons both must be above.
    assert without.decides["value"] == -9
    assert without.contradicts == pytest.approx(3 * 0.01)

    table.loc[3, "why_not"] = "no row"
    assert claims.judge(table) is None, "a statement is left without comparisons"


def test_a_claim_that_is_untestable_is_never_compared():
    claim = Claim("x", "1", "x", [], untestable="no such thing")
    table = claims.comparisons(claim, claims.Paper({}))
    assert table["why_not"].tolist() == ["no such thing"]
    assert claims.judge(table) is None


@pytest.mark.parametrize(("is_complete", "counts"), [(True, (0.2, 0.01)), (False, (1.0, 1.0))])
def test_what_was_not_run_may_be_the_one_that_lies_apart(is_complete, counts):
    statement = Statement("t", ["changed", "changed more"], ["default"], apart=1)
    claim = Claim("sensitive", "1", "x", above=[statement])
    here = Judgement(supports=0.2, contradicts=0.01, decides=pd.Series())
    assert verdicts._p_values(claim, here, is_complete) == counts
