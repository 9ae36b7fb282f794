"""Pages with kept numbers: none is stale, and each changed number is seen.

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
import yaml
from PIL import Image

from puma_study import figures, store
from puma_study.record import FinishedRun
from pumalib import evaluation, paths
from pumalib.models import backbones
from tools import page_methods, page_parts, page_rows, pages
from tools.__main__ import main

README = (paths.ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = paths.ROOT / "results"
PAGES = pages.list_pages()
DOCS = ["README.md", *(f"docs/{file.name}" for file in sorted((paths.ROOT / "docs").glob("*.md")))]
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
INTERVAL = re.compile(r"\[[+-]?\d+\.\d+, [+-]?\d+\.\d+\]")


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
    return kept_of(PAGES["README.md"])


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


def test_settings_that_a_search_chose_stand_beside_what_was_tried(kept, monkeypatch):
    columns = ["row", "rate", "knob", "value", "seed", "epochs", "mirrored", "harmonic", "chosen"]
    knob = ("lora_scale", 1.0)
    lines = [
        ("lora", 3e-5, *knob, 0, 8, True, 0.5, False),
        ("lora", 1e-4, *knob, 0, 8, True, 0.6, True),
        ("lora", 1e-4, *knob, 1, 8, True, 0.7, True),
        # Neither of these was tried likewise.
        ("lora", 1e-4, *knob, 0, 8, False, 0.1, False),
        ("lora", 1e-4, *knob, 0, 16, True, 0.9, False),
    ]
    constructed = pd.DataFrame(lines, columns=columns)
    monkeypatch.setattr(kept, "table", lambda file, profile: constructed)
    text = page_parts.tuned(kept)
    assert text.splitlines()[-1] == "| `lora` | 0.0001 | `lora_scale` 1 | 65.0 | 50.0 to 60.0 | 2 |"


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
    assert statements[0] == "| in its summary | statement | `far` | `near` |"
    assert statements[2] == "| l. 1 | Statement 1 | supported | undecided |"
    assert statements[3] == "| l. 2 | Statement 2 |  |  |"
    counts = page_parts.verdicts(kept, ["far", "near"], "survey_claims").splitlines()
    assert counts[2:] == ["| `far` | 1 | 0 | 0 | 1 | 1 |", "| `near` | 0 | 0 | 1 | 1 | 1 |"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_is_kept(name, kept_of):
    """... or `python -m tools pages` writes it anew."""
    kept = kept_of(PAGES[name])
    text = (paths.ROOT / name).read_text(encoding="utf-8")
    assert pages.MARKER.search(text)
    assert pages.written(text, kept, name) == text


def test_the_numbers_of_a_row_are_the_mean_of_its_runs(readmes):
    """PUMA's R@1 and its parameters, from other code, beside the printed R@1."""
    names = runs_of("PUMA", readmes.stage)
    records = [store.record(name, RESULTS / readmes.stage) for name in names]
    tables = [record.scores() for record in records]

    unified, harmonic = [
        100 * np.mean([table.at[column, "R@1"] for table in tables])
        for column in ("unified", "harmonic")
    ]
    trained = records[0].parameters.trainable / 1e6
    expected = f"| PUMA | {unified:.1f} | 81.3 | {harmonic:.1f} | 84.1 | {trained:.2f} M |"
    assert len(names) == 5
    assert expected in page_parts.headline(readmes, ["linear", "puma"])
    assert expected in README


def test_words_follow_from_the_interval(kept, monkeypatch):
    def gap(points, low, high):
        monkeypatch.setattr(
            kept, "difference", lambda *_: page_rows.Difference(points, low, high, np.nan)
        )
        return page_parts.gap_words(kept, "puma - full")

    assert gap(-5.7, -6.7, -4.7) == "5.7 points below"
    assert gap(5.7, 1.0, 10.4) == "5.7 points above"
    assert gap(3.6, -2.4, 9.5) == gap(0.1, 0.0, 0.2) == "not told apart from"


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


def readme_rewritten():
    return rewritten(README, PAGES["README.md"])


def harmonic_of_puma(page):
    return float(re.search(r"^\| PUMA \| [\d.]+ \| 81.3 \| ([\d.]+) \|", page, re.MULTILINE)[1])


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


def test_a_changed_accuracy_changes_the_page(copied):
    assert readme_rewritten() == README

    def higher(name, hits):
        if name == "unified":
            return hits
        missed = np.flatnonzero(hits == 0)
        hits = hits.copy()
        hits[missed[: round(0.01 * len(hits))]] = 1
        return hits

    # One point more on each dataset, in one of five runs.
    stage = page_rows.Kept().stage
    copied(runs_of("PUMA", stage)[0], lambda record: set_hits(record, higher), stage)
    after = rewritten(pages.CHECK.sub("", README), stage)
    gained = harmonic_of_puma(after) - harmonic_of_puma(README)
    assert 0.05 < gained < 0.45


def test_changed_hits_change_the_sentence(copied):
    """Three of four LoRA queries found: far above PUMA."""

    def more_found(name, hits):
        return np.arange(len(hits)) % 4 > 0

    sentence = "It is <!-- gap: puma - lora -->{}<!-- end --> LoRA."
    before = rewritten(sentence.format(""))
    assert re.fullmatch(r"It is \d\.\d points below LoRA\.", COMMENT.sub("", before))
    for run in runs_of("LoRA"):
        copied(run, lambda record: set_hits(record, more_found))
    after = rewritten(before)
    assert re.fullmatch(r"It is \d\d\.\d points below LoRA\.", COMMENT.sub("", after))


def test_changed_hits_refute_what_was_found(copied):
    """PUMA with three of four queries found: the page of findings says it is below LoRA."""
    page = (paths.ROOT / "docs" / "findings" / "photos.md").read_text(encoding="utf-8")
    section = re.search(r"^## 06_adaptation_methods\n.*?(?=^## )", page, re.DOTALL | re.MULTILINE)
    assert section is not None and rewritten(section[0]) == section[0]

    def more_found(name, hits):
        return np.arange(len(hits)) % 4 > 0

    for run in runs_of("PUMA"):
        copied(run, lambda record: set_hits(record, more_found))
    with pytest.raises(ValueError, match="puma < lora does not hold on photos: unified"):
        rewritten(section[0])


def test_which_method_takes_a_profile_as_soon_as_it_is_kept(tmp_path, monkeypatch):
    """`photos-21k` is another profile's results under its name; before, it is named as missing."""
    (tmp_path / "photos").symlink_to(RESULTS / "photos")
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    asked = {
        "by-images": "profiles: [photos-21k, photos]\nmethods: [linear, PUMA]\nshots: [1, 4]",
        "by-method": "profiles: [photos-21k, photos]\nrows: [linear, puma]",
        "by-distance": "profiles: [photos-21k, photos]\nrows: [linear, puma]",
    }
    for kind, said in asked.items():
        page = f"<!-- {kind}:\n{said}\n-->\n<!-- end -->"
        before = rewritten(page)
        assert "Not kept yet: `photos-21k`." in before
        assert "| `photos-21k` |" not in before
        (tmp_path / "photos-21k").symlink_to(RESULTS / "photos")
        after = rewritten(before)
        (tmp_path / "photos-21k").unlink()
        assert "Not kept yet" not in after
        assert after.count("| `photos-21k` |") == after.count("| `photos` |") > 0
        with pytest.raises(ValueError, match="no profile of photos-21k has rows of"):
            rewritten(page.replace(", photos]", "]"))


def test_a_gap_has_the_averages_that_the_settings_name(kept_of):
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


def test_a_gap_is_of_two_profiles_against_each_other(kept_of):
    kept = kept_of("photos-8")
    one = kept.difference("puma", "full", "photos-8", "cars_196")
    other = kept.difference("puma", "full", "photos-8-reversed", "cars_196")
    both = kept.difference("puma", "full", "photos-8 against photos-8-reversed", "cars_196")
    assert both.points == pytest.approx(one.points - other.points, abs=0.16)
    assert both.high - both.low > one.high - one.low
    assert np.isnan(both.paper)


def test_named_runs_are_a_row(monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", RESULTS)
    kept = page_rows.Kept("photos-8")
    names = kept.names("full", "photos-8")
    kept.rows["same"] = page_rows.Row("the same", runs=tuple(names))
    same = kept.difference("same", "puma", "photos-8", "unified")
    full = kept.difference("full", "puma", "photos-8", "unified")
    assert same[:3] == full[:3]


def test_which_method_says_the_numbers_of_runs(kept):
    found = kept.difference("few_shot/PUMA 4", "few_shot/frozen 0", "photos", "unified")
    table = page_methods.by_images(kept, ["photos"], ["linear", "PUMA", "LoRA"], [1, 4])
    cell = f"{found.points:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"
    (line,) = table.splitlines()[2:]
    assert line.endswith(f"| {cell} | not run | PUMA |")
    assert "| highest |" in table.splitlines()[0]

    records = [store.record(name, "photos") for name in runs_of("PUMA")]
    minutes = np.mean([record.seconds for record in records]) / 60
    images = 87 * 90 * 8
    line = page_methods.by_method(kept, ["photos"], ["puma"]).splitlines()[2]
    assert line.endswith(f"| {images:,} | {minutes:.1f} | not measured |")

    by_distance = page_methods.by_distance(kept, ["photos"], ["linear", "puma"]).splitlines()[2:]
    known = [float(line.split(" | ")[2]) for line in by_distance]
    assert known == sorted(known, reverse=True)
    assert len(known) == 5


def test_a_changed_verdict_changes_the_page(copied):
    file = copied.folder / "photos" / "claims.csv"
    table = pd.read_csv(file, index_col="name")
    assert table.at["lora", "here"] == "contradicted"
    table.loc["lora", "here"] = "supported"
    table.to_csv(file)
    counts = table["here"].value_counts()
    line = f"| `photos` | 1 | 5 | {counts['undecided']} | {counts['not testable']} |"
    assert line in readme_rewritten()


def test_the_stage_is_one_setting(copied):
    """README with the runs of another profile, here a copy under its name."""
    stage = page_rows.Kept().stage
    (copied.folder / "photos-gpu").symlink_to(copied.folder / stage)
    expected = README.replace(f"results/{stage}/claimed", "results/photos-gpu/claimed")
    assert expected != README
    assert rewritten(README, "photos-gpu") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A <!-- gap: puma - full --> B", "the page, <!-- gap: puma - full -->: no <!-- end -->"),
        ("<!-- gap: puma - full -->x<!-- end --> B", "a line that begins with a comment"),
        ("A <!-- gab: puma - full -->x<!-- end -->", "no kind of marker; known: holds, gap, "),
        ("A <!-- gap: puma -->x<!-- end -->", "'puma': write row - other"),
        ("A <!-- level: pumma -->x<!-- end -->", "has no row 'pumma'; it has frozen, linear, "),
        ("A <!-- level: nope/PUMA -->x<!-- end -->", "there is no .*nope.csv"),
        ("A <!-- level: few_shot/PUMA 3 -->x<!-- end -->", "has no row 'PUMA 3'"),
        ("A <!-- gap: puma - full, sop -->x<!-- end -->", "there is no column 'sop'; there are "),
        ("A <!-- level: puma, sop -->x<!-- end -->", "puma in photos has no column 'sop'"),
        ("A <!-- count: certain -->x<!-- end -->", "'certain'"),
        ("<!-- differences:\npair: [puma - full]\n-->\n<!-- end -->", "argument 'pair'"),
        ("<!-- holds: puma > full -->", r"puma > full does not hold on photos: unified -\d"),
        ("<!-- holds: puma ~ full, harmonic -->", r"does not hold on photos: harmonic -\d"),
        ("<!-- holds: puma >> full -->", "write row < other, row ~ other or row > other"),
    ],
)
def test_what_a_page_gets_wrong_is_named(text, message, kept):
    with pytest.raises(ValueError, match=message):
        pages.written(text, kept)


def test_what_holds_is_left_as_it_is(kept):
    text = "<!-- holds: puma < full; puma ~ stochastic; static > full, animals_tinyimagenet -->"
    assert pages.written(text, kept) == text


def test_only_pages_that_changed_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    stale = "A <!-- print-count: fails -->4<!-- end -->"
    fresh = "A <!-- print-count: fails -->5<!-- end -->"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "pages.yaml").write_text(
        "{stage: photos, pages: {a.md: stage, b.md: mini}, rows: {}, rivals: {}, averages: {}}"
    )
    (tmp_path / "a.md").write_text(stale)
    (tmp_path / "b.md").write_text(fresh)
    monkeypatch.setattr(paths, "RESULTS", RESULTS)
    assert pages.write() == [tmp_path / "a.md"]
    assert (tmp_path / "a.md").read_text() == fresh


def test_the_command_writes_and_draws(copied, tmp_path, monkeypatch, capsys):
    root = tmp_path / "project"
    (root / "docs").mkdir(parents=True)
    settings = yaml.safe_load((paths.ROOT / "docs" / "pages.yaml").read_text(encoding="utf-8"))
    settings["pages"] = {"a.md": "stage"}
    (root / "docs" / "pages.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (root / "a.md").write_text("A <!-- gap: puma - full --><!-- end -->", encoding="utf-8")
    monkeypatch.setattr(paths, "ROOT", root)
    drawn = copied.folder / settings["stage"] / "claimed_and_measured.csv"
    drawn.unlink()
    assert main(["pages"]) == 0
    assert "not told apart from<!-- end -->" in (root / "a.md").read_text(encoding="utf-8")
    for end in ("csv", "svg", "png"):
        assert drawn.with_suffix(f".{end}").stat().st_size > 400
    assert "written: a.md" in capsys.readouterr().out

    (root / "a.md").write_text("A <!-- holds: puma > full -->", encoding="utf-8")
    assert main(["pages"]) == 2
    assert "a.md, <!-- holds: puma > full -->: puma > full does not hold" in capsys.readouterr().err


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


def test_a_profile_without_rivals_is_named(kept_of):
    with pytest.raises(ValueError, match="has no rivals of 'mini': list them under `rivals`"):
        page_rows.claimed(kept_of("mini"))


def test_readmes_figure_was_drawn_from_what_is_kept(readmes):
    """... or `python -m tools pages` draws it anew, and writes its numbers beside it."""
    file = RESULTS / readmes.stage / "claimed_and_measured.csv"
    pd.testing.assert_frame_equal(pd.read_csv(file), page_rows.claimed(readmes))
    assert f"results/{readmes.stage}/claimed_and_measured.png" in README


def test_a_figure_is_saved_alike_each_time_in_both_forms(kept, tmp_path):
    for end in ("svg", "png"):
        for name in ("one", "two"):
            figure = figures.claimed_and_measured(page_rows.claimed(kept), "PUMA", "points")
            figures.save(figure, tmp_path / f"{name}.{end}")
        assert (tmp_path / f"one.{end}").read_bytes() == (tmp_path / f"two.{end}").read_bytes()


# ---- README and docs


def test_readme_is_short_and_has_no_interval():
    assert len(COMMENT.sub("", README).split()) <= 900
    assert not INTERVAL.search(README)


@pytest.mark.parametrize("name", DOCS)
def test_links_of_docs_lead_somewhere(name):
    file = paths.ROOT / name
    text = COMMENT.sub("", file.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name}: {link}"


def anchors(text):
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    kept_letters = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return [heading.replace(" ", "-") for heading in kept_letters]


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
