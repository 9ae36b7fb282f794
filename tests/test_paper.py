"""The paper's printed numbers: transcribed faithfully and judged by their own arithmetic.

Its parameters are counted again.
"""

import fnmatch
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from kept_runs import add, any_name

from puma_study import claims, printed, verdicts
from pumalib import config, evaluation, paths

PAPER_TEXT = Path(__file__).resolve().parents[2] / "shared" / "paper" / "puma_paper.txt"
ROWS = {1: 8, 2: 24, 3: 6, 4: 6, 5: 10, 6: 4, 7: 5, 8: 4, 9: 6, 10: 25, 11: 19, 12: 7}
PRINTED = {number: printed.table(number) for number in ROWS}


def test_tables_are_complete_and_what_is_damaged_or_absent_is_empty():
    assert {
        number: len(table) for number, table in PRINTED.items() if table.index.is_unique
    } == ROWS
    empty = {number: int(PRINTED[number].isna().sum().sum()) for number in range(2, 13)}
    # 9: no row of specific PA (9 + 9) and no changes for the other two (18);
    # 10: what the CNN rows do not print;
    # 11: the last column, cut off in our copy.
    assert {number: count for number, count in empty.items() if count} == {9: 36, 10: 8, 11: 19}
    assert PRINTED[11]["aircraft_r4"].isna().all()
    assert PRINTED[3]["marks"].value_counts().to_dict() == {"restored": 3, "printed": 3}


def test_one_number_or_nan_where_none_is_printed():
    assert printed.value(2, "PUMA", "harmonic") == 84.1
    assert np.isnan(printed.value(2, "PUMA", "mean"))
    assert np.isnan(printed.value(2, "static", "harmonic"))  # it is a row of Table 3


@pytest.mark.skipif(not PAPER_TEXT.exists(), reason="the paper's text is not beside the checkout")
@pytest.mark.parametrize("number", [number for number in ROWS if number not in (1, 3)])
def test_every_row_stands_in_the_paper(number):
    """The numbers of each row, in their order and as printed, are a piece of the paper's text."""
    text = re.sub(r"[^-+.\d]+", " ", PAPER_TEXT.read_text(encoding="utf-8"))
    table = pd.read_csv(
        paths.PAPER / f"table{number}.csv", index_col="row", dtype=str, keep_default_na=False
    )
    first = next(place for place, name in enumerate(table) if name.split("_")[0] == "cub")
    for row, cells in table.iterrows():
        names = [name for name in table.columns[first:] if not name.endswith("_change")]
        absent = "-" if number == 10 else ""
        values = [
            f"{cells[name] or absent} {cells.get(f'{name}_change', '')}".strip() for name in names
        ]
        line = " ".join(value for value in values if value)
        assert line in text, f"table {number}, {row}"
        if "params_train_m" in table:
            both = f"{cells['params_train_m']} {cells['params_total_m']}"
            assert f"{both} {line}" in text, f"table {number}, {row}: parameters"


def test_printed_harmonic_means_follow_from_the_printed_columns():
    """... except in some rows, where they do not, however the columns are rounded."""
    found = {number: printed.inconsistent(number) for number in ROWS}
    assert {n: len(rows) for n, rows in found.items() if len(rows)} == {
        2: 8,
        3: 1,
        7: 1,
        9: 1,
        10: 2,
        12: 1,
    }
    assert found[2].loc["universal PA", ["printed", "recomputed"]].tolist() == pytest.approx(
        [71, 78], abs=0.05
    )
    assert found[7].loc["PUMA + Stochastic LoRA", ["printed", "recomputed"]].round(1).tolist() == [
        83.9,
        83.2,
    ]


def test_claims_by_the_papers_own_numbers():
    """The print confirms most claims, refutes some, and only draws three."""
    paper = claims.Paper(printed.all_tables())
    tables = {claim.name: claims.comparisons(claim, paper) for claim in claims.read_claims()}
    found = {name: claims.judge(table) for name, table in tables.items()}
    drawn = ["few-shot-linear", "few-shot-full", "half"]
    assert [name for name, judgement in found.items() if judgement is None] == drawn
    assert {judgement.supports for judgement in found.values() if judgement} == {0, 1}
    failing = [name for name, judgement in found.items() if judgement and judgement.supports == 1]
    why = {name: verdicts._why(tables[name], found[name], 0) for name in found}
    reasons = {name: why[name].partition(";")[0] for name in failing}
    assert reasons == {
        # and on Flowers (99.3 against 99.4)
        "beats-specific-each": "PUMA over specific PA, sop: -0.4",
        # below 7 of 18, 2 too few
        "only-efficient": "specific Hyp over AdaptFormer, harmonic: -0.2",
        "stochastic-adapter": "stochastic over static, inshop: -0.5",
        "memory-falls-short": "ArcFace over MS + XBM, harmonic: -4.9",
        # 85.7 - 83.6, not 3.1
        "four-universal": "PUMA over universal PA, unified: +2.1",
    }
    assert why["beats-universal"] == "PUMA over universal PA, unified: +3.4; it decides among 18"


RUN = json.loads(config.Profile("x", pretrained="random").run("linear").to_json())
DRAWN = {"cub": 60, "cars": 40, "sop": 80}  # classes of five queries each; sop is large


@pytest.fixture
def study_of(tmp_path, monkeypatch):
    """A profile's kept runs.

    Each query of a class hits with the row's rate, which differs from class to class.  Rows
    `once` have one seed.
    """
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    any_name(monkeypatch)
    train = pd.DataFrame({"dataset": ["sop"] * 50 + ["cub"] * 9 + ["cars"] * 10})
    monkeypatch.setattr(claims.data, "load", lambda data: SimpleNamespace(train=train))

    def make(seeds=5, once=(), **tables):
        shutil.rmtree(tmp_path / "test", ignore_errors=True)
        rng = np.random.default_rng(0)
        ease = {name: rng.uniform(-0.2, 0.2, (classes, 1)) for name, classes in DRAWN.items()}
        for file, rows in tables.items():
            lines = []
            for row, rate in rows.items():
                run = row.replace(" ", "_").replace("/", "-")
                count = 1 if row in once else seeds
                names = [f"{run}-{seed}" for seed in range(count)]
                for seed, name in enumerate(names):
                    hits = {
                        key: (rng.random((n, 5)) < rate + ease[key]).ravel()
                        for key, n in DRAWN.items()
                    }
                    hits["unified"] = np.concatenate(list(hits.values()))
                    table = [
                        {"dataset": key, "queries": len(hit), "R@1": hit.mean()}
                        for key, hit in hits.items()
                    ]
                    own = [row["R@1"] for row in table if row["dataset"] != "unified"]
                    harmonic = float(evaluation.harmonic_mean(np.array(own)))
                    table.append(
                        {"dataset": "harmonic", "queries": len(hits["unified"]), "R@1": harmonic}
                    )
                    first = {
                        key: evaluation.pack(np.arange(len(hit)) % 5 == 0)
                        for key, hit in hits.items()
                    }
                    packed = {key: evaluation.pack(hit) for key, hit in hits.items()}
                    record = {
                        "name": name,
                        "run": RUN | {"seed": seed, "dim": 16 + sum(row.encode())},
                        "environment": {"device": "cpu"},
                        "seconds": 1.0,
                    }
                    record |= {
                        "parameters": {"trainable": 1, "total": 2},
                        "images_per_second": None,
                    }
                    add({**record, "table": table, "hits": packed, "classes": first})
                lines.append({"row": row, "runs": " ".join(names)})
            pd.DataFrame(lines).to_csv(tmp_path / "test" / f"{file}.csv", index=False)
        return verdicts.scorecard(make.profile)

    make.profile = SimpleNamespace(name="test", data=None, large=None)
    return make


FULL = {"frozen": 0.3, "universal CurricularFace": 0.5}


def test_every_row_that_a_claim_names_is_printed():
    """... or a claim would be judged without a row whose name is misspelt."""
    tables = printed.all_tables()
    for claim in claims.read_claims():
        for one in claim.above:
            if one.table not in tables:
                continue
            for name in [*one.winners, *one.rivals]:
                assert fnmatch.filter(tables[one.table].index, name), f"{claim.name}: {name}"


def test_a_claim_follows_from_kept_runs(study_of):
    nine = {name: 0.5 for name in printed.table(2).index if name.startswith("universal")}
    rows = FULL | nine | {"PUMA": 0.65, "LoRA": 0.5, "VPT": 0.6}
    found = study_of(main_results=rows, components={"static": 0.4, "stochastic": 0.6})
    assert (found["here"][["beats-universal", "stochastic-adapter"]] == "supported").all()
    assert (found["here"][["few-parameters", "every-scale"]] == "not testable").all()
    # Two of its five rivals were run: they may refute it, and alone support nothing.
    assert found.at["beats-efficient", "here"] == "undecided"
    assert found.at["beats-efficient", "why"].endswith("2 of 5 pairs of rows could be compared")
    refuted = study_of(main_results=FULL | {"PUMA": 0.4, "LoRA": 0.6}).loc["beats-efficient"]
    assert refuted["here"] == "contradicted" and not refuted["could_support"]
    none = study_of(main_results=FULL | {"PUMA": 0.65}).loc["beats-efficient"]
    assert none["here"] == "not testable" and none["why"].startswith("no row 'Linear Emb.', ")
    said = r"PUMA over universal \w+, \w+: \+\d+\.\d \[\+.*, .*\]; it decides among 18"
    assert re.fullmatch(said, found.at["beats-universal", "why"])
    few = study_of(main_results=FULL | {"PUMA": 0.65}).loc["beats-universal"]
    assert few["here"] == "undecided" and few["why"].endswith(
        "; 1 of 9 pairs of rows could be compared"
    )
    assert (
        study_of(main_results=FULL | {"PUMA": 0.4}).at["beats-universal", "here"] == "contradicted"
    )
    assert (
        study_of(main_results=FULL | nine | {"PUMA": 0.5}).at["beats-universal", "here"]
        == "undecided"
    )
    most = study_of(
        main_results=FULL | {"universal PA": 0.1, "PUMA": 0.4, "LoRA": 0.6}
    )  # PA collapsed
    assert (
        most.at["beats-universal", "here"] == "contradicted"
        and "; 1 of 9" in most.at["beats-universal", "why"]
    )
    assert most.at["only-efficient", "here"] == "not testable", "no specific model"


def test_a_subset_of_a_dataset_answers_for_it_and_never_for_the_others(study_of, monkeypatch):
    """... which a dataset does not that has the name alone."""
    drawn = {"birds_cub50": 60, "cars_196": 40, "aircraft": 80}
    monkeypatch.setattr(sys.modules[__name__], "DRAWN", drawn)
    train = pd.DataFrame({"dataset": list(drawn)})
    monkeypatch.setattr(claims.data, "load", lambda data: SimpleNamespace(train=train))

    below = study_of(main_results=FULL | {"Linear Emb.": 0.35, "VPT": 0.35}).loc["few-parameters"]
    assert below["here"] == "undecided", "three of its four datasets are not there"
    assert (below["comparisons"], below["side_low"], below["could_support"]) == (2, 2, False)
    assert ", cars (its subset cars_196): +" in below["why"]
    assert below["why"].endswith("; it decides among 2; no sop, inshop, aircraft")

    above = study_of(main_results=FULL | {"Linear Emb.": 0.35, "VPT": 0.75}).loc["few-parameters"]
    assert above["here"] == "contradicted"

    drawn.pop("cars_196")
    neither = study_of(main_results=FULL | {"Linear Emb.": 0.35, "VPT": 0.35})
    assert neither.at["few-parameters", "here"] == "not testable"
    assert neither.at["few-parameters", "why"].endswith("no cars")


def test_a_claim_is_withheld_where_its_runs_cannot_answer(study_of):
    cases = (1, 0.3, 0.6, "one seed"), (5, 0.3, 0.1, "PUMA collapsed"), (5, 0.5, 0.6, "a gain")
    for seeds, frozen, puma, why in cases:
        assert (
            why
            in study_of(seeds, main_results=FULL | {"frozen": frozen, "PUMA": puma}).at[
                "beats-universal", "why"
            ]
        )
    # A row of one seed is as one that was not run: the others may refute the claim.
    rows = FULL | {"universal PA": 0.5, "PUMA": 0.4}
    beside = study_of(once=["universal PA"], main_results=rows).loc["beats-universal"]
    assert beside["here"] == "contradicted"
    assert (beside["pairs"], beside["could_support"]) == (1, False)
    assert "PUMA over universal PA: one seed" in beside["withheld"]
    scales = dict.fromkeys(printed.table(4).index, 0.5) | {"frozen ViT-S": 0.6}
    assert "a gain" in study_of(backbones=scales).at["small-model", "why"]


def test_parameters_counted_from_models_agree_with_the_print():
    counted = printed.parameters()
    committed = pd.read_csv(paths.ROOT / "results" / "parameters.csv")
    for column in ("table", "row", "models", "trainable", "total", "agrees"):
        assert counted[column].tolist() == committed[column].tolist(), column


def test_a_verdict_says_what_it_rests_on(study_of):
    rows = FULL | {"universal PA": 0.5, "PUMA": 0.65, "LoRA": 0.8, "VPT": 0.6}
    card = study_of(main_results=rows, adaptation_methods={"PUMA": 0.65, "LoRA": 0.8})
    many = card.loc["beats-universal"]
    assert many["rows_run"] == "PUMA, universal PA, universal CurricularFace"
    assert "universal MS" in many["rows_missing"]
    assert (many["pairs"], many["pairs_needed"], many["could_support"]) == (2, 9, False)
    assert (many["comparisons"], many["on_its_side"]) == (4, 4)
    assert (many["side_low"], many["side_high"]) == (4, 4)
    assert many["here"] == "undecided", "seven of its rows were not run"
    assert card["could_support"].dtype == bool
    # A difference of 15 points is found: it is above the smallest one that would be.
    assert 0 < many["smallest_found"] < 15

    nothing = card.loc["half"]
    assert (nothing["pairs"], nothing["contrasts"], nothing["comparisons"]) == (0, 0, 0)
    assert np.isnan(nothing["smallest_found"]) and nothing["decided_by"] == ""


def test_claims_about_one_pair_of_runs_are_named_together(study_of):
    others = dict.fromkeys(("Linear Emb.", "MLP-3 Emb.", "VPT", "AdaptFormer"), 0.5)
    both = {"PUMA": 0.5, "LoRA": 0.8}
    # Both tables name the same runs of PUMA and of LoRA.
    card = study_of(
        main_results=FULL | both | others,
        adaptation_methods=both | {"Stochastic LoRA": 0.7},
    )
    assert (card["here"][["beats-efficient", "lora"]] == "contradicted").all()
    assert (card["decided_by"][["beats-efficient", "lora"]] == "PUMA and LoRA").all()
    assert card["contrasts"][["beats-efficient", "lora"]].tolist() == [5, 2]
    assert card.at["lora", "shared_with"] == "beats-efficient, lean-to-large"
    assert card.at["stochastic-lora", "shared_with"] == ""


FEW = [f"{method} {shots}" for method in ("PUMA", "linear", "full") for shots in (1, 2, 4, 8, 16)]


def test_a_claim_about_collapse_is_judged_where_rows_collapse(study_of):
    below_frozen = {name: 0.6 if name.startswith("PUMA") else 0.4 for name in FEW}
    rows = {"frozen": 0.7, "universal CurricularFace": 0.8}
    card = study_of(main_results=rows | {"PUMA": 0.3}, few_shot=below_frozen)
    assert card.at["few-shot-linear", "here"] == "supported"
    assert card.at["few-shot-full", "here"] == "supported"
    assert card.at["beats-universal", "here"] == "not testable"
    assert "PUMA collapsed" in card.at["beats-universal", "why"]
    withheld = card.at["beats-universal", "withheld"]
    assert withheld.startswith("PUMA collapsed: harmonic R@1 ends at 31.1, below half of")
    assert withheld.endswith(", and no cosine was recorded")
    assert card.at["few-shot-full", "withheld"] == ""


@pytest.mark.parametrize(
    ("cosines", "accuracy", "how"),
    [
        ([0.99, 0.98], 0.6, "the mean cosine within a batch ends at 0.985"),
        ([0.99, 0.96], 0.6, ""),
        ([0.2, None], 0.2, "harmonic R@1 ends at 20.0, below half of the frozen backbone's 50.0"),
        ([None, None], 0.2, "harmonic R@1 ends at 20.0, .*50.0, and no cosine was recorded"),
        ([None, None], 0.25, ""),
    ],
)
def test_what_collapsed_is_one_point_or_below_half_of_the_frozen_backbone(
    cosines, accuracy, how, monkeypatch
):
    def record(cosine, accuracy):
        log = [{"cosine": 0.1}, {} if cosine is None else {"cosine": cosine}]
        return SimpleNamespace(log=log, accuracy=lambda dataset: accuracy)

    records = {"frozen": SimpleNamespace(log=[], accuracy=lambda dataset: 0.5)}
    for number, cosine in enumerate(cosines):
        records[f"row-{number}"] = record(cosine, accuracy)

    def kept(names, profile):
        return {name: records[name] for name in names}

    monkeypatch.setattr(claims.store, "records", kept)
    found = claims.collapse(["row-0", "row-1"], ["frozen"], "test")
    assert re.fullmatch(how, found)


def test_a_row_that_lost_to_the_frozen_backbone_is_compared_and_named(study_of):
    rows = {"frozen": 0.6, "universal CurricularFace": 0.8, "PUMA": 0.7, "MLP-3 Emb.": 0.4}
    line = study_of(main_results=rows).loc["beats-efficient"]
    assert (line["pairs"], line["withheld"]) == (1, "")
    assert line["below_frozen"] == "MLP-3 Emb."
