"""Pages with kept numbers: no table is stale, and each changed number is seen.

What README says runs as it stands there.
"""

import functools
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image

from puma_study import figures, store
from puma_study.record import FinishedRun
from pumalib import evaluation, paths
from pumalib.models import backbones
from tools import page_parts, page_rows, pages
from tools.__main__ import main

README = (paths.ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = paths.ROOT / "results"
DOCS = ["README.md", *(f"docs/{file.name}" for file in sorted((paths.ROOT / "docs").glob("*.md")))]
DOCS.append("docs/report/report.md")
# A marker of a table and its content.
GAP = "<!-- differences:\npairs: [puma - lora]\n-->{}<!-- end -->"


@pytest.fixture(scope="module")
def kept_of():
    """A function from a profile to the project's kept runs, cached for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", RESULTS)
        yield functools.cache(page_rows.Kept)


@pytest.fixture
def kept(kept_of, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", RESULTS)
    return kept_of("photos")


@pytest.fixture
def readmes(kept_of, monkeypatch):
    """The kept runs with README's settings."""
    monkeypatch.setattr(paths, "RESULTS", RESULTS)
    return kept_of(pages.PAGES["README.md"])


def test_rows_stand_beside_their_loss_where_every_seed_has_one(kept, monkeypatch):
    losses = {"first": 1.0, "second": 2.0}
    monkeypatch.setattr(kept, "names", lambda key, profile: list(losses))
    monkeypatch.setattr(kept, "levels", lambda key, profile, column: (50.0, 40.0, 60.0))

    def record(name, profile):
        return SimpleNamespace(open_loss=losses[name])

    monkeypatch.setattr(page_rows.store, "record", record)

    def lines():
        table = page_parts.rows_table(kept, ["puma"], losses=True, parameters=False, printed=False)
        return table.splitlines()

    assert lines()[0].startswith("|  | training loss | unified")
    assert lines()[-1].startswith("| PUMA | 1.50 |")
    losses["second"] = None
    assert lines()[-1].startswith("| PUMA |  |")


def test_statements_stand_beside_their_verdicts_and_a_stage_that_cannot_test_says_nothing(
    tmp_path, monkeypatch
):
    head = "name,section,claim,here,why,could_support"
    said = {"far": ("supported", "not testable"), "near": ("undecided", "not testable")}
    for profile, verdicts in said.items():
        lines = [head]
        for number, verdict in enumerate(verdicts, 1):
            lines.append(f"s{number},l. {number},Statement {number},{verdict},because,True")
        folder = tmp_path / profile
        folder.mkdir()
        (folder / "survey_claims.csv").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    kept = page_rows.Kept("far")

    statements = page_parts.statements(kept, ["far", "near"]).splitlines()
    assert statements[0] == "| in the digest | statement | `far` | `near` |"
    assert statements[2] == "| l. 1 | Statement 1 | supported | undecided |"
    assert statements[3] == "| l. 2 | Statement 2 |  |  |"
    counts = page_parts.verdicts(kept, ["far", "near"], "survey_claims").splitlines()
    assert counts[2:] == ["| `far` | 1 | 0 | 0 | 1 | 1 |", "| `near` | 0 | 0 | 1 | 1 | 1 |"]


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_says_what_is_kept(name, kept_of):
    """... or `python -m tools pages` writes it anew."""
    kept = kept_of(pages.PAGES[name])
    text = (paths.ROOT / name).read_text(encoding="utf-8")
    assert pages.MARKER.search(text)
    assert pages.written(text, kept, name) == text


def test_the_numbers_of_a_row_are_the_mean_of_its_runs(readmes):
    """PUMA's R@1 and its parameters, from other code, beside the printed R@1."""
    names = runs_of("PUMA", readmes.main_profile)
    records = [store.record(name, RESULTS / readmes.main_profile) for name in names]
    tables = [record.scores() for record in records]

    unified, harmonic = [
        f"{100 * np.mean([table.at[column, 'R@1'] for table in tables]):.1f}"
        for column in ("unified", "harmonic")
    ]
    assert len(names) == 5
    (line,) = page_parts.rows_table(readmes, ["puma"]).splitlines()[2:]
    trained = records[0].parameters.trainable / 1e6
    assert line.startswith(f"| PUMA | {trained:.2f} / ")
    assert f"| {unified} [" in line and f"| {harmonic} [" in line
    assert line.endswith("| 81.3 | 84.1 |")
    assert line in (paths.ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of what README shows of the kept results, and a way to change a line of it."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    for profile in ("photos", "photos-8", "photos-8-reversed", "photos-21k"):
        without_pictures = shutil.ignore_patterns("*.png")
        shutil.copytree(RESULTS / profile, tmp_path / profile, ignore=without_pictures)
    (tmp_path / "mini").mkdir()
    shutil.copy(RESULTS / "mini" / "claims.csv", tmp_path / "mini")

    def change(name, changed, profile="photos"):
        file = tmp_path / profile / "kept-1.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines()
        places = [place for place, line in enumerate(lines) if json.loads(line)["name"] == name]
        record = json.loads(lines[places[0]])
        del record["digest"]
        changed(record)
        lines[places[0]] = FinishedRun.of(record).line()
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    change.folder = tmp_path
    return change


def runs_of(row, profile="photos"):
    table = pd.read_csv(RESULTS / profile / "adaptation_methods.csv")
    return table.loc[table["row"] == row, "runs"].iloc[0].split()


def rewritten(text, profile="photos"):
    return pages.written(text, page_rows.Kept(profile), "the page")


def set_hits(record, change):
    """Change the hits of every dataset and unified, and R@1 with them, which must follow."""
    own = []
    for line in record["table"]:
        name = line["dataset"]
        if name in record["hits"]:
            hits = change(name, evaluation.unpack(record["hits"][name], line["queries"]))
            record["hits"][name] = evaluation.pack(hits)
            line["R@1"] = float(hits.mean())
            if name != "unified":
                own.append(line["R@1"])
        elif name == "harmonic":
            line["R@1"] = float(evaluation.harmonic_mean(np.array(own)))


def test_changed_hits_change_the_page(copied):
    """Three of four LoRA queries found: far above PUMA."""

    def more_found(name, hits):
        return np.arange(len(hits)) % 4 > 0

    before = rewritten(GAP.format(""))
    assert re.search(r"\| PUMA minus LoRA \| -\d\.\d \[", before)
    for run in runs_of("LoRA"):
        copied(run, lambda record: set_hits(record, more_found))
    assert re.search(r"\| PUMA minus LoRA \| -\d\d\.\d \[", rewritten(before))


def test_a_difference_has_averages_without_a_dataset_and_by_shares(kept_of):
    """The harmonic mean without clothes, from other code; and unified R@1 by shares is another."""
    kept = kept_of("photos-8")
    names = {row: kept.names(row, "photos-8") for row in ("lora", "full")}
    means = {}
    for row, runs in names.items():
        by_seed = []
        for name in runs:
            lines = store.record(name, "photos-8").scores()
            own = lines["R@1"].drop(["unified", "harmonic", "clothes"])
            by_seed.append(len(own) / (1 / own).sum())
        means[row] = np.mean(by_seed)
    found = kept.difference("lora", "full", "photos-8", "harmonic without clothes")
    assert found.points == pytest.approx(100 * (means["lora"] - means["full"]), abs=0.06)
    assert found.low < found.points < found.high
    weighted = kept.difference("lora", "full", "photos-8", "weighted unified")
    assert weighted.points != kept.difference("lora", "full", "photos-8", "unified").points


def test_a_difference_is_of_two_profiles_against_each_other(kept_of):
    kept = kept_of("photos-8")
    one = kept.difference("puma", "full", "photos-8", "cars_196")
    other = kept.difference("puma", "full", "photos-8-reversed", "cars_196")
    both = kept.difference("puma", "full", "photos-8 against photos-8-reversed", "cars_196")
    assert both.points == pytest.approx(one.points - other.points, abs=0.16)
    assert both.high - both.low > one.high - one.low
    assert np.isnan(both.paper)


def test_splits_have_their_mean_and_each_of_them(kept, monkeypatch):
    lines = []
    for split, points in {"the protocol's": -2.0, "drawn, seed 1": 1.0}.items():
        lines.append((split, "unified", 0.5, 0.0, 1.0))
        lines.append((split, "harmonic", points, -3.0, 3.0))
    lines.append(("over 2 splits", "unified", 0.5, 0.25, 0.75))
    lines.append(("over 2 splits", "harmonic", -0.5, -19.6, 18.6))
    table = pd.DataFrame(lines, columns=["split", "dataset", "points", "low", "high"])
    table = table.assign(pair="PUMA minus LoRA")
    monkeypatch.setattr(kept, "table", lambda file, profile: table)

    over_all = page_parts.over_splits(kept, ["puma - lora"], ["harmonic", "unified"])
    on_each = page_parts.on_each_split(kept, ["puma - lora"], ["harmonic", "unified"])

    assert over_all.splitlines()[0] == (
        "| difference | harmonic | unified | paper: harmonic | paper: unified |"
    )
    assert over_all.splitlines()[2] == (
        "| PUMA minus LoRA | -0.5 [-19.6, +18.6] | +0.5 [+0.2, +0.8] | +7.6 | +5.2 |"
    )
    assert on_each.splitlines()[2] == "| PUMA minus LoRA | -2.0, +1.0 | +0.5, +0.5 |"
    with pytest.raises(ValueError, match="class_splits.csv has no 'unified' of 'PUMA"):
        kept.on_splits("puma", "static", "unified")


def test_a_row_may_have_another_name_in_print(readmes):
    """Full fine-tuning at the longer search's rate stands beside what the paper prints of it."""
    longer = readmes.row("full-3e-5")
    assert longer.row != longer.in_print
    assert readmes.printed("full-3e-5", "unified") == 77.9
    assert readmes.printed("full", "unified") == 77.9


def test_a_reading_stands_beside_both_effects(readmes):
    """As notebook 17 kept it; of `stochastic-adapter` cars decide, on which the paper gains."""
    kept = pd.read_csv(RESULTS / readmes.main_profile / "claims_readings.csv", index_col="name")
    claim = kept.loc["stochastic-adapter"]
    effects = f"{claim['paper']:+.1f} | {claim['ours']}"
    line = f"| {claim['claim']} | R@1, cars | {effects} | {claim['reading']} |"
    assert page_parts.readings(readmes, ["stochastic-adapter"]).splitlines()[2] == line
    assert line in README
    every = page_parts.readings(readmes)
    assert len(every.splitlines()) - 2 == (kept["reading"] != "not run").sum()


def test_a_changed_verdict_changes_the_page(copied):
    file = copied.folder / "photos" / "claims.csv"
    table = pd.read_csv(file, index_col="name")
    assert table.at["lora", "here"] == "contradicted"
    table.loc["lora", "here"] = "supported"
    table.to_csv(file)
    counts = table["here"].value_counts()
    verdicts = ("supported", "contradicted", "undecided", "not testable")
    line = f"| `photos` | {' | '.join(str(counts[verdict]) for verdict in verdicts)} |"
    page = "<!-- verdicts:\nprofiles: [photos]\n-->\n<!-- end -->"
    assert line in rewritten(page)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- differences:\n-->", "the page, <!-- differences: -->: no <!-- end -->"),
        ("<!-- difference:\n-->\n<!-- end -->", "no kind of marker; known: claimed-figure, rows"),
        ("<!-- differences:\npairs: [puma]\n-->\n<!-- end -->", "'puma': write row - other"),
        ("<!-- rows:\nrows: [pumma]\n-->\n<!-- end -->", "there is no row 'pumma'; there are fr"),
        ("<!-- rows:\nrows: [nope/PUMA]\n-->\n<!-- end -->", "there is no .*nope.csv"),
        ("<!-- rows:\nrows: [few_shot/PUMA 3]\n-->\n<!-- end -->", "has no row 'PUMA 3'"),
        (
            "<!-- differences:\npairs: [puma - full]\ncolumns: [sop]\n-->\n<!-- end -->",
            "there is no column 'sop'; there are ",
        ),
        ("<!-- differences:\npair: [puma - full]\n-->\n<!-- end -->", "argument 'pair'"),
    ],
)
def test_what_a_page_gets_wrong_is_named(marker, message, kept):
    with pytest.raises(ValueError, match=message):
        pages.written(marker, kept)


def test_pairs_are_called_as_the_page_says_and_columns_without_print_are_left_out(kept):
    pairs = {"ours minus theirs": "puma - full"}
    table = page_parts.differences(kept, pairs, columns=["unified", "cars_196"]).splitlines()
    assert table[0] == "| difference | unified | cars | paper: unified |"
    assert table[2].startswith("| ours minus theirs | -")


def test_only_pages_that_changed_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", {"a.md": "photos", "b.md": "mini"})
    monkeypatch.setattr(paths, "RESULTS", RESULTS)
    fresh = pages.written(GAP.format(""), page_rows.Kept("mini"))
    (tmp_path / "a.md").write_text(fresh)
    (tmp_path / "b.md").write_text(fresh)
    assert pages.write() == [tmp_path / "a.md"]
    assert (tmp_path / "b.md").read_text() == fresh != (tmp_path / "a.md").read_text()


def test_the_command_writes_and_draws(copied, tmp_path, monkeypatch, capsys):
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.md").write_text(GAP.format(""), encoding="utf-8")
    monkeypatch.setattr(pages, "PAGES", {"a.md": page_rows.MAIN_PROFILE})
    monkeypatch.setattr(paths, "ROOT", root)
    drawn = copied.folder / page_rows.MAIN_PROFILE / "claimed_and_measured.csv"
    drawn.unlink()
    assert main(["pages"]) == 0
    assert "| PUMA minus LoRA |" in (root / "a.md").read_text(encoding="utf-8")
    for end in ("csv", "svg", "png"):
        assert drawn.with_suffix(f".{end}").stat().st_size > 400
    assert "written: a.md" in capsys.readouterr().out

    (root / "a.md").write_text("<!-- rows:\nrows: [pumma]\n-->\n<!-- end -->", encoding="utf-8")
    assert main(["pages"]) == 2
    assert "a.md, <!-- rows: rows: [pumma] -->: there is no row" in capsys.readouterr().err


# ---- the figure


def test_the_figure_shows_measured_and_printed_differences(readmes):
    table = page_rows.claimed(readmes)
    figure = figures.claimed_and_measured(table, "PUMA", "points")
    assert [axis.get_title() for axis in figure.axes] == ["unified", "harmonic"]
    for axis in figure.axes:
        own = table[table["panel"] == axis.get_title()]
        measured, printed = (axis.get_lines()[place] for place in (0, 1))
        assert list(measured.get_xdata()) == list(own["points"])
        assert list(printed.get_xdata()) == list(own["paper"])
    unified = table[table["panel"] == "unified"]
    assert unified["points"].is_monotonic_decreasing
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == list(unified["rival"])


def test_readmes_figure_was_drawn_from_what_is_kept(readmes):
    """... or `python -m tools pages` draws it anew, and writes its numbers beside it."""
    file = RESULTS / readmes.main_profile / "claimed_and_measured.csv"
    pd.testing.assert_frame_equal(pd.read_csv(file), page_rows.claimed(readmes))
    assert f"results/{readmes.main_profile}/claimed_and_measured.png" in README


def test_a_figure_is_saved_alike_each_time_in_both_forms(readmes, tmp_path):
    for end in ("svg", "png"):
        for name in ("one", "two"):
            figure = figures.claimed_and_measured(page_rows.claimed(readmes), "PUMA", "points")
            figures.save(figure, tmp_path / f"{name}.{end}")
        assert (tmp_path / f"one.{end}").read_bytes() == (tmp_path / f"two.{end}").read_bytes()


# ---- README and docs


def test_readme_is_short():
    # Words that are read: no addresses of links, and no lines of tables.
    read = re.sub(r"\]\([^)]*\)", "]", pages.without_markers(README))
    assert len([word for word in read.split() if re.search(r"\w", word)]) <= 700


@pytest.mark.parametrize("name", DOCS)
def test_links_of_docs_lead_somewhere(name):
    file = paths.ROOT / name
    text = pages.without_markers(file.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{name}: {link}"
        # Tables of the report have names of their own.
        if anchor and not anchor.startswith("tbl-"):
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name}: {link}"


def anchors(text):
    """The names that GitHub gives to headings."""
    return [pages.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]


def test_readmes_lines_for_own_images_run_as_they_stand(tmp_path, monkeypatch):
    """... with a small untrained backbone in place of the one that a network would give."""
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line]) == 5
    rng = np.random.default_rng(0)
    for dataset in ("cats", "dogs"):
        for name in ("one", "two", "three", "four"):
            folder = tmp_path / "my-images" / dataset / name
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = rng.integers(0, 256, (8, 8, 3), "uint8")
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    for name in ("a.jpg", "b.jpg"):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), "uint8")).save(tmp_path / name)

    make = timm.create_model

    def untrained(name, **options):
        torch.manual_seed(0)
        small = {"pretrained": False, "embed_dim": 48, "depth": 2, "num_heads": 3}
        return make(name, **options | small)

    monkeypatch.setattr(backbones.timm, "create_model", untrained)
    monkeypatch.setattr(backbones, "_ask_hub", lambda name: None)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(code, found)
    assert found["vectors"].shape == (2, 128)
    np.testing.assert_allclose(np.diag(found["similarity"]), 1, rtol=1e-5)
