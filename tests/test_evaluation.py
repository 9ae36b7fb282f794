"""Retrieval metrics against values by hand, a plain loop and pytorch-metric-learning."""

import os

import faiss
import numpy as np
import pandas as pd
import pytest
import torch

from pumalib.evaluation import KS, evaluate_files, metrics, neighbours, scores, search
from pumalib.evaluation import evaluate as from_arrays


def evaluate(embeddings, images, ks=(1, 2, 4, 8), bootstrap=0, **options):
    return scores(embeddings, images, ks, **options).table(bootstrap)


def table(labels, dataset="a", split="test") -> pd.DataFrame:
    n = len(labels)
    columns = {
        "label": labels,
        "dataset": dataset,
        "split": split,
        "path": [f"{i}.jpg" for i in range(n)],
    }
    return pd.DataFrame(columns, index=np.arange(n) + 100)  # positions count, not the index


def angles(*degrees) -> np.ndarray:
    """Unit vectors in the plane: the cosine order is the order of angles."""
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def random_case(seed=0, n=300, classes=20, dim=6, datasets=("a", "b", "c")):
    rng = np.random.default_rng(seed)
    images = table(rng.integers(classes, size=n), rng.choice(datasets, size=n))
    centres = rng.normal(size=(classes, dim))
    return (centres[images["label"]] + rng.normal(size=(n, dim))).astype(np.float32), images


def city_block(a, b):
    """A distance given as a function; its values may be negative, like a negated similarity."""
    assert len(a) * len(b) <= max(search.BLOCK, len(b))
    return -torch.cdist(a, b, p=1)


def nearness(embeddings, distance):
    """(n, n) of the rule: cosines in steps of 2^-30, distances in float32; larger is nearer."""
    x = embeddings.astype(float)
    if distance == "cosine":
        x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        return np.rint(x @ x.T * 2**30)
    return np.stack([np.abs(x - row).sum(1) for row in x]).astype(np.float32)


def plain_loop(embeddings, images, ks, distance="cosine"):
    """Every definition spelt out, query by query: as `Scores.values`."""
    near, rows = nearness(embeddings, distance), images.reset_index(drop=True)
    key = list(zip(rows.dataset, rows.label))
    found, names = {}, list(dict.fromkeys(rows.dataset))
    order = sorted(
        range(len(rows)), key=lambda q: (names.index(rows.dataset[q]), key.index(key[q]))
    )  # class by class
    for name in [*names, "unified"]:
        mine = np.ones(len(rows), bool) if name == "unified" else (rows.dataset == name).to_numpy()
        lines = []
        for q in (q for q in order if mine[q] and rows.split[q] != "gallery"):
            gallery = [g for g in np.flatnonzero(mine & (rows.split != "query")) if g != q]
            hits = [
                key[g] == key[q] for g in sorted(gallery, key=lambda g: -near[q, g])
            ]  # sorted() is stable
            size = sum(hits)
            if size:
                precision = [sum(hits[: i + 1]) / (i + 1) * hits[i] for i in range(size)]
                lines.append(
                    [float(any(hits[:k])) for k in ks]
                    + [sum(hits[:size]) / size, sum(precision) / size]
                )
        found[name] = np.array(lines)
    return found


def test_hand_computed_values():
    def found(degrees, images, row="a"):
        return evaluate(angles(*degrees), images).loc[row]

    # R = 3 and relevance 1, 0, 1 give RP 2/3 and MAP@R (1 + 2/3) / 3.
    one = found((0, 1, 2, 3, 90, 80), table([0, 0, 1, 0, 0, 1], split=["query"] + ["gallery"] * 5))
    assert one[["R@1", "R@2", "RP", "MAP@R"]].tolist() == pytest.approx([1, 1, 2 / 3, 5 / 9])
    # The only positive is the third of three: recall grows with k, and k may exceed the gallery.
    last = found((0, 1, 2, 3), table([0, 1, 1, 0], split=["query"] + ["gallery"] * 3))
    assert last[["R@1", "R@2", "R@4", "R@8"]].tolist() == [0, 0, 1, 1]
    # The query of class 0 has no other image of its class; the two of class 1 have each other, and
    # image 1 is nearest to image 0.
    two = found((0, 10, 20), table([0, 1, 1]))
    assert two[["R@1", "R@8", "RP", "MAP@R", "queries", "excluded"]].tolist() == [
        0.5,
        1,
        0.5,
        0.5,
        2,
        1,
    ]
    # Labels collide between datasets: the nearest image has the same label in the other dataset.
    collide = table([0, 0, 0, 0], dataset=["a", "b", "a", "b"])
    assert found((0, 1, 30, 31), collide, ["a", "b"])["R@1"].tolist() == [1, 1]
    assert found((0, 1, 30, 31), collide, "unified")[["R@1", "R@2", "RP"]].tolist() == [0, 0.5, 0]


def test_relevant_images_are_those_of_the_class_in_the_gallery_without_the_query():
    classes = np.array([0, 0, 0, 1, 1, 2])
    test = np.full(6, "test")
    assert metrics.relevant_count(classes, test).tolist() == [2, 2, 2, 1, 1, 0]
    # A query that is also in the gallery does not count itself; any other query counts all matches.
    mixed = np.array(["query", "test", "gallery", "query", "query", "gallery"])
    assert metrics.relevant_count(classes, mixed)[[0, 1, 3, 4]].tolist() == [2, 1, 0, 0]


RANKED = metrics.Ranked(
    # Of the first query all count; of the second the first and the third are of another dataset.
    rank=np.array([[1, 2, 3, 4], [0, 1, 1, 2]]),
    hit=np.array([[True, False, True, True], [False, False, False, True]]),
    relevant=np.array([3, 2]),
)


def test_metrics_of_ranked_hits():
    assert metrics.first_hit(RANKED).tolist() == [1, 2]
    assert metrics.r_precision(RANKED).tolist() == [2 / 3, 1 / 2]
    assert metrics.map_at_r(RANKED).tolist() == [(1 + 2 / 3) / 3, (1 / 2) / 2]


def test_neighbours_tell_a_metric_only_where_there_are_enough():
    # A hit tells R@k for all k; without one, all k must have been seen; RP needs R of them.
    rank = np.array([[1, 2], [1, 2], [1, 1]])
    hit = np.array([[True, False], [False, False], [True, False]])
    ranked = metrics.Ranked(rank, hit, np.array([2, 2, 2]))
    assert ranked.tells(8).tolist() == [True, False, False]
    assert ranked.tells(2).tolist() == [True, True, False]


def test_keys_order_by_similarity_then_by_the_table():
    similarity = np.array([5, 5, -3, 2**30, search.ITSELF])
    rows = np.array([9, 2, 0, 2**32 - 1, 7])
    keys = np.sort(search._key(similarity, rows))[::-1]
    assert search._row(keys).tolist() == [2**32 - 1, 2, 9, 0, 7]
    assert search._similarity(keys).tolist() == [2**30, 5, 5, -3, search.ITSELF]


def test_the_order_of_distances_is_that_of_their_floats():
    distances = torch.tensor([3.0, -0.0, 1e-30, 0.0, -2.0, -1e30, 1e30, -1e-45])
    found = search._reversed_order(distances.double())
    assert found[1] == found[3]
    assert found.argsort(descending=True, stable=True).tolist() == [5, 4, 7, 1, 3, 2, 0, 6]


def test_duplicate_of_the_query_stays_in_the_gallery():
    """Rows 0 and 1 are the same picture: whichever is the query, the other is its nearest."""
    images = table([0, 0, 1, 1])
    same = np.array([[1, 0], [1, 0], [1, 0.1], [0, 1]], dtype=np.float32)
    assert neighbours(same, images, [0, 1], k=3).tolist() == [[1, 2, 3], [0, 2, 3]]
    relabelled = table(
        [0, 1, 0, 1]
    )  # dropping the first column would drop row 0 instead of the query, row 1
    assert neighbours(same, relabelled, [1], k=1).tolist() == [[0]]
    assert (
        evaluate(same, images).loc["a", "R@1"] == 0.5 + 0.25
    )  # row 2 finds row 0, row 3 finds row 2


KINDS = {  # what float32 tells apart well, badly, and not at all
    "clustered": lambda x, rng: x,
    "duplicates": lambda x, rng: x[rng.integers(len(x) // 7, size=len(x))],
    "near ties": lambda x, rng: (
        x[rng.integers(9, size=len(x))].astype(float) + 1e-8 * rng.normal(size=x.shape)
    ),
    "far from zero": lambda x, rng: 1e-3 * x.astype(float) + 100,
    "collapsed": lambda x, rng: np.zeros_like(x),
}


@pytest.mark.parametrize("distance", ["cosine", city_block])
@pytest.mark.parametrize("split", ["test", "inshop"])
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_plain_loop(kind, split, distance, monkeypatch):
    monkeypatch.setattr(search, "QUERIES", 64)
    monkeypatch.setattr(search, "LEAST_NUMBERS", 96)
    monkeypatch.setattr(search, "LEAST_QUERIES", 16)
    monkeypatch.setattr(search, "PAIRS", 10)
    embeddings, images = random_case(classes=6)
    rng = np.random.default_rng(1)
    embeddings = KINDS[kind](embeddings, rng)
    images.loc[images.label == 5, "label"] = (
        np.arange((images.label == 5).sum()) + 5
    )  # classes of very few, too
    if split == "inshop":
        images["split"] = rng.choice(["query", "gallery", "test"], size=len(images))
    expected = plain_loop(embeddings, images, KS, distance)
    for spare, shallow, block in ((8, 8, 2**24), (0, 1, 10_000), (200, 100, 1)):
        monkeypatch.setattr(search, "SPARE", spare)
        monkeypatch.setattr(metrics, "SHALLOW", shallow)
        monkeypatch.setattr(search, "BLOCK", block)
        found = scores(embeddings, images, KS, distance=distance)
        assert list(found.values) == list(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(found.values[name][:, : len(KS)], values[:, : len(KS)])
            np.testing.assert_allclose(found.values[name], values, rtol=1e-13)


def test_only_what_float32_cannot_tell_is_searched_in_float64(monkeypatch):
    whole = []
    again = []
    by_float64 = search._by_float64
    cosines = search._cosines

    def searched(space, queries, rows, references, count):
        whole.append(len(queries))
        return by_float64(space, queries, rows, references, count)

    def scored(vectors, queries, rows):
        again.append(len(rows))
        return cosines(vectors, queries, rows)

    monkeypatch.setattr(search, "_by_float64", searched)
    monkeypatch.setattr(search, "_cosines", scored)
    embeddings, images = random_case(n=1000, dim=32, datasets=("a",), classes=100)
    scores(embeddings, images)
    found = 1000 * (8 + 1 + search.SPARE)
    assert sum(whole) == 0
    assert sum(again) < 0.05 * found
    # More copies than there are spare neighbours.
    embeddings[:40] = embeddings[0]
    scores(embeddings, images)
    assert 40 <= sum(whole) <= 200


@pytest.mark.parametrize("kind", KINDS)
def test_large_classes_are_searched_in_float64_at_once_with_the_same_result(kind, monkeypatch):
    embeddings, images = random_case(n=400, classes=4, datasets=("a", "b"))
    embeddings = KINDS[kind](embeddings, np.random.default_rng(1))
    monkeypatch.setattr(search, "BLOCK", 4000)
    expected = scores(embeddings, images, KS)
    held = []
    by_float64 = search._by_float64

    def searched(space, queries, rows, references, count):
        held.append(len(queries) * len(rows))
        return by_float64(space, queries, rows, references, count)

    monkeypatch.setattr(search, "_by_float64", searched)
    monkeypatch.setattr(search, "DEEP", 40)
    monkeypatch.setattr(search, "DEEP_BLOCK", 4000)
    found = scores(embeddings, images, KS)
    assert max(held) == 4000
    # All queries, none of which float32 tried before.
    assert sum(held) >= 400 * 400
    for name, values in expected.values.items():
        # R@k and RP; MAP@R is a sum, whose last bit depends on how many neighbours were found.
        np.testing.assert_array_equal(found.values[name][:, :-1], values[:, :-1])
        np.testing.assert_allclose(found.values[name], values, rtol=1e-13)


def test_a_long_search_shows_how_far_it_is(monkeypatch, capsys):
    embeddings, images = random_case()
    scores(embeddings, images)
    assert "searching" not in capsys.readouterr().err
    monkeypatch.setattr(metrics, "BAR_AFTER", 0)
    scores(embeddings, images)
    assert "searching: 100%" in capsys.readouterr().err


def test_the_bound_on_float32_holds():
    rng = np.random.default_rng(0)
    for dim in (2, 128, 1000):
        vectors = rng.normal(size=(400, dim)) + rng.normal(size=dim)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        rounded = vectors.astype(np.float32)
        error = np.abs(rounded @ rounded.T - vectors @ vectors.T).max()
        assert 0 < error <= search._error(dim)


def test_search_leaves_the_number_of_threads_as_it_was():
    before = (faiss.omp_get_max_threads(), torch.get_num_threads())
    embeddings, images = random_case()
    scores(embeddings, images)
    assert (faiss.omp_get_max_threads(), torch.get_num_threads()) == before


@pytest.mark.parametrize("split", ["test", "inshop"])
def test_against_pytorch_metric_learning(split):
    accuracy_calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.inference import CustomKNN

    names = {"precision_at_1": "R@1", "r_precision": "RP", "mean_average_precision_at_r": "MAP@R"}
    calculator = accuracy_calculator.AccuracyCalculator(
        include=tuple(names),
        k="max_bin_count",
        device=torch.device("cpu"),
        knn_func=CustomKNN(CosineSimilarity()),
    )
    embeddings, images = random_case(seed=7, datasets=("a",))
    points, labels = torch.tensor(embeddings), torch.tensor(images["label"].to_numpy())
    if split == "test":
        theirs = calculator.get_accuracy(points, labels)
    else:
        images["split"] = np.where(np.arange(len(images)) < 100, "query", "gallery")
        theirs = calculator.get_accuracy(points[:100], labels[:100], points[100:], labels[100:])
    ours = evaluate(embeddings, images).loc["a"]
    for name, metric in names.items():
        assert ours[metric] == pytest.approx(theirs[name], abs=1e-12), metric


def test_bootstrap_of_a_tiny_case():
    """Four queries of four classes, three right: a resample's mean is binomial(4, 3/4) / 4.

    It is 0 with probability 0.4 %, at most 1/4 with 5.1 %, and 1 with 31.6 %: the 2.5 % point is
    1/4 and the 97.5 % point 1.
    """
    images = table([0, 1, 2, 3, 0, 1, 2, 3], split=["query"] * 4 + ["gallery"] * 4)
    result = evaluate(angles(0, 45, 0, 70, 0, 45, 90, 70), images, ks=(1,), bootstrap=4000)
    assert result.loc["a", ["R@1_low", "R@1", "R@1_high"]].tolist() == [0.25, 0.75, 1.0]


def test_intervals_are_the_same_in_any_order_of_the_datasets_rows():
    embeddings, images = random_case(n=200, datasets=("a", "b"))
    by_dataset = np.argsort(pd.factorize(images["dataset"])[0], kind="stable")
    mixed = evaluate(embeddings, images, bootstrap=100)
    grouped = evaluate(embeddings[by_dataset], images.iloc[by_dataset], bootstrap=100)
    pd.testing.assert_frame_equal(mixed, grouped)


def test_neighbours_within_and_across_datasets():
    images = table(
        [0, 0, 0, 1], dataset=["a", "b", "a", "b"], split=["query", "test", "gallery", "test"]
    )
    embeddings = angles(0, 1, 2, 3)
    assert neighbours(embeddings, images, [0], k=1).tolist() == [[2]]
    assert neighbours(embeddings, images, [1, 0], k=2, within_dataset=False).tolist() == [
        [2, 3],
        [1, 2],
    ]
    with pytest.raises(ValueError, match="dataset 'a' has 1 gallery images, too few for k=2"):
        neighbours(embeddings, images, [0], k=2)


def test_bad_input():
    embeddings, images = random_case(n=40, classes=10, datasets=("a",))
    broken = embeddings.copy()
    broken[7, 2] = np.nan
    for change, options, message in (
        ({}, {"embeddings": embeddings[:39]}, r"shape \(39, 6\) for a table of 40 images"),
        (
            {},
            {"embeddings": broken},
            f"1 embeddings are not finite, first that of row 7: .*{images.path.iloc[7]}",
        ),
        ({"split": "train"}, {}, "unknown split 'train'; known: test, query, gallery"),
        ({"split": "query"}, {}, "dataset 'a': no query has another image of its class"),
        ({"label": np.arange(40)}, {}, "dataset 'a': no query has another image of its class"),
        ({"label": [*range(39), np.nan]}, {}, "1 of 40 images have no label, first that of row 39"),
        ({"label": [None, *"a" * 39]}, {}, "1 of 40 images have no label, first that of row 0"),
        ({"dataset": None}, {}, "40 of 40 images have no dataset, first that of row 0"),
        ({"dataset": "unified"}, {}, "dataset 'unified': the name of an overall accuracy; rename"),
        ({"dataset": "harmonic"}, {}, "dataset 'harmonic': the name of an overall accuracy"),
        ({}, {"embeddings": embeddings.astype(str)}, "embeddings are <U32; real numbers are need"),
        ({}, {"embeddings": embeddings.astype(complex)}, "are complex128; real numbers are needed"),
        ({}, {"distance": "l1"}, "unknown distance 'l1'; known: cosine, a function"),
        (
            {},
            {"distance": lambda a, b: torch.cdist(a, b) * torch.nan},
            "must return .* finite numbers",
        ),
        ({}, {"ks": (0, 1)}, "ks must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(**{"embeddings": embeddings, "images": images.assign(**change)} | options)


@pytest.mark.parametrize("text", ["gA==", "!!!!", 8 * "!", "gIAAAAA="])
def test_bits_of_another_count_are_refused(text):
    with pytest.raises(ValueError):
        metrics.unpack(text, 17)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_gives_the_same_table():
    embeddings, images = random_case(seed=8, n=2000)
    on_gpu = evaluate(embeddings, images, bootstrap=50, device="cuda")
    pd.testing.assert_frame_equal(on_gpu, evaluate(embeddings, images, bootstrap=50))


# ---- from arrays and files, as anybody has them


def test_queries_and_a_gallery_as_rows_or_as_truth_values():
    vectors = angles(0, 10, 20, 100, 30)
    labels = ["a", "b", "a", "b", "a"]
    # Query 0 finds rows 2 and 4 (both "a"); query 1 is nearest to 2, then 4, then 3 ("b").
    table = from_arrays(vectors, labels, queries=[0, 1], gallery=[2, 3, 4])
    assert table.at["all", "R@1"] == 0.5
    assert table.at["all", "R@4"] == 1
    assert table.at["all", "RP"] == pytest.approx((1 + 0) / 2)
    assert table.at["all", "queries"] == 2
    is_query = np.array([True, True, False, False, False])
    assert from_arrays(vectors, labels, queries=is_query, gallery=~is_query).equals(table)
    # Every row in the gallery: the query itself is left out, row 1 is now the nearest of row 0.
    assert from_arrays(vectors, labels, queries=[0]).at["all", "R@1"] == 0
    # A row that is neither is not there.
    alone = from_arrays(vectors, labels, queries=[0], gallery=[2, 4])
    assert alone.at["all", "MAP@R"] == 1


def test_queries_and_gallery_against_pytorch_metric_learning():
    accuracy_calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    embeddings, images = random_case(n=200, datasets=("a",))
    labels = images["label"].to_numpy()
    queries = np.arange(200) < 60
    table = from_arrays(embeddings, labels, queries=queries, gallery=~queries)
    calculator = accuracy_calculator.AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=torch.device("cpu"),
    )
    unit = torch.nn.functional.normalize(torch.from_numpy(embeddings))
    theirs = calculator.get_accuracy(
        unit[queries], torch.tensor(labels[queries]), unit[~queries], torch.tensor(labels[~queries])
    )
    ours = table.loc["all"]
    assert ours["R@1"] == pytest.approx(theirs["precision_at_1"], abs=1e-6)
    assert ours["RP"] == pytest.approx(theirs["r_precision"], abs=1e-6)
    assert ours["MAP@R"] == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": [0, 1]}, "2 labels for 4 vectors"),
        ({"datasets": ["a"]}, "1 datasets for 4 vectors"),
        ({"queries": [4]}, "queries must name one or more rows from 0 to 3"),
        ({"queries": []}, "queries must be row numbers"),
        ({"queries": [1, 0, 1]}, "queries names row 1 more than once; name a row once, or give Tr"),
        ({"queries": [0, 0, 0, 0]}, "queries chooses no row; one or more must be True"),
        (
            {"queries": np.eye(4)},
            r"queries: of shape \(4, 4\); a list or an array \(n,\) is needed",
        ),
        ({"queries": {0, 1}}, "queries: a set; a list or an array"),
        ({"queries": [True, None, True, False]}, "queries: the value in place 1 is missing; fill"),
        ({"queries": ["True"] * 4}, "queries must be row numbers, or True and False"),
        ({"labels": np.zeros((4, 1))}, r"labels: of shape \(4, 1\); a list or an array"),
        ({"labels": [[0], [0], [1], [1]]}, r"labels hold \[0\]; one name or number each"),
        ({"labels": dict.fromkeys(range(4), 0)}, "labels: a dict; a list or an array"),
        ({"labels": ["1", 1, "1", 1]}, "labels mix text and numbers, such as '1' and 1; make all"),
        ({"labels": ["a", "a", "", ""]}, "2 of 4 images have no label, first that of row 2"),
        ({"datasets": ["a", None, "a", "a"]}, "1 of 4 images have no dataset, first that of row 1"),
        ({"gallery": [-1]}, "gallery must name one or more rows from 0 to 3"),
        ({"gallery": [0.5]}, "gallery must be row numbers, or True and False"),
        ({"gallery": [True]}, r"gallery of shape \(1,\) for 4 vectors"),
        ({"queries": [0], "gallery": [2]}, "no query has another image of its class"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(given, message):
    whole = {"labels": [0, 0, 1, 1], **given}
    with pytest.raises(ValueError, match=message):
        from_arrays(angles(0, 1, 2, 3), **whole)


# Eight classes of five images, some of them mixed; the first image of each class is a query.
CLASSES = np.repeat(np.arange(8), 5)
CLUSTERS = np.random.default_rng(0).normal(size=(40, 16))
CLUSTERS += np.random.default_rng(1).normal(size=(8, 16))[CLASSES]
ASKS = np.arange(40) % 5 == 0


@pytest.mark.parametrize(
    "given",
    [
        ASKS,
        ASKS.tolist(),
        ASKS.astype(int),
        ASKS.astype(np.uint8),
        ASKS.astype(float),
        ASKS.astype(int).tolist(),
        pd.Series(ASKS.astype(int), index=np.arange(40)[::-1]),
        pd.Series(ASKS, dtype="boolean"),
        torch.tensor(ASKS).int(),
        np.flatnonzero(ASKS),
        pd.Index(np.flatnonzero(ASKS)),
        range(0, 40, 5),
    ],
    ids=lambda given: f"{type(given).__name__} {getattr(given, 'dtype', '')}",
)
def test_zeros_and_ones_are_truth_values_and_no_row_numbers(given):
    row = from_arrays(CLUSTERS, CLASSES, queries=given, gallery=~ASKS).loc["all"]
    assert row[["R@1", "queries"]].tolist() == [0.875, 8]
    if len(given) == 40:
        rest = 1 - np.asarray(given, dtype=int)
        assert from_arrays(CLUSTERS, CLASSES, queries=given, gallery=rest).loc["all"].equals(row)


def test_of_two_rows_zero_and_one_are_the_numbers():
    assert from_arrays(angles(0, 1), [0, 0], queries=[0, 1]).at["all", "queries"] == 2


@pytest.mark.parametrize("missing", [float("nan"), None, pd.NA, pd.NaT], ids=str)
@pytest.mark.parametrize("kind", [list, pd.Series, pd.Categorical, np.array])
def test_a_missing_label_is_no_class(kind, missing):
    labels = [missing if number > 5 else f"c{number}" for number in CLASSES]
    given = np.array(labels, dtype=object) if kind is np.array else kind(labels)
    with pytest.raises(ValueError, match="10 of 40 images have no label, first that of row 30"):
        from_arrays(CLUSTERS, given)


@pytest.mark.parametrize(
    "labels",
    [
        pd.Categorical(CLASSES.astype(str), categories=[*"97531086426"][:10]),
        [torch.tensor(number) for number in CLASSES],
        torch.tensor(CLASSES),
        CLASSES.astype(float),
        CLASSES.astype(bytes),
        pd.to_datetime(CLASSES),
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_labels_of_any_kind_are_classes(labels):
    assert from_arrays(CLUSTERS, labels).equals(from_arrays(CLUSTERS, CLASSES))


@pytest.mark.parametrize(
    "vectors",
    [
        CLUSTERS.tolist(),
        pd.DataFrame(CLUSTERS, index=np.arange(40)[::-1]),
        torch.tensor(CLUSTERS, requires_grad=True),
        # Lengths whose squares, or which themselves, a product takes for zero or infinite.
        CLUSTERS * 1e-20,
        CLUSTERS * 1e-200,
        CLUSTERS * 1e200,
        (CLUSTERS * 1e-30).astype(np.float32),
        np.where(CLASSES[:, None] == 3, CLUSTERS * 1e-20, CLUSTERS),
    ],
)
def test_vectors_of_any_kind_and_length(vectors):
    before = from_arrays(CLUSTERS, CLASSES, queries=ASKS, gallery=~ASKS)
    assert before.at["all", "R@1"] == 0.875
    assert from_arrays(vectors, CLASSES, queries=ASKS, gallery=~ASKS).equals(before)


def test_vectors_without_a_direction_or_a_shape_are_refused():
    zero = np.where(np.arange(40)[:, None] == 7, 0, CLUSTERS)
    with pytest.raises(ValueError, match="1 of 40 vectors are zero, first that of row 7"):
        from_arrays(zero, CLASSES)
    used = np.arange(40) != 7
    assert from_arrays(zero, CLASSES, queries=used, gallery=used).at["all", "queries"] == 39
    with pytest.raises(ValueError, match=r"vectors of shape \(40,\); \(n, dim\) is needed"):
        from_arrays(CLUSTERS[:, 0], CLASSES)
    with pytest.raises(ValueError, match="no array of numbers .* vectors of one length are needed"):
        from_arrays([[1.0], [1.0, 2.0]], [0, 0])


def test_neighbours_of_truth_values_are_refused():
    with pytest.raises(ValueError, match="queries are bool; positions are needed"):
        neighbours(CLUSTERS, table(CLASSES), ASKS, k=1)
    with pytest.raises(ValueError, match="queries name a position more than once"):
        neighbours(CLUSTERS, table(CLASSES), np.asarray(ASKS).astype(int), k=1)
    for beyond in (-1, len(CLUSTERS)):
        with pytest.raises(ValueError, match="queries must be positions from 0 to 39"):
            neighbours(CLUSTERS, table(CLASSES), [beyond], k=1)


@pytest.fixture
def files(tmp_path):
    """Four vectors in the order of other paths, whose nearest are in pairs."""
    names = ["x/b.jpg", "y/a.jpg", "x/a.jpg", "y/b.jpg"]
    np.savez(tmp_path / "vectors.npz", vectors=angles(0, 90, 1, 91), paths=names)
    return tmp_path


def test_files_of_vectors_and_labels(files):
    vectors = files / "vectors.npz"
    assert evaluate_files(vectors).at["all", "R@1"] == 1, "the folder of an image is its class"
    labels = files / "labels.csv"
    labels.write_text("path,label\nx/a.jpg,1\ny/a.jpg,1\nx/b.jpg,2\ny/b.jpg,2\nz.jpg,3\n")
    assert evaluate_files(vectors, labels).at["all", "R@1"] == 0
    labels.write_text("label\n1\n2\n1\n2\n")
    assert evaluate_files(vectors, labels).at["all", "R@1"] == 1, "in the order of the vectors"
    np.save(files / "vectors.npy", angles(0, 90, 1, 91))
    whole = (files / "vectors.npy").read_bytes()
    lying = whole.replace(b"(4, 2), }" + 12 * b" ", b"(1000000000004, 2), }")
    assert len(lying) == len(whole) and lying != whole
    (files / "lying.npy").write_bytes(lying)
    with pytest.raises(ValueError, match=r"lying.npy is no file of numpy"):
        evaluate_files(files / "lying.npy", labels)
    os.mkfifo(files / "pipe")
    for vectors, of_labels in ((files / "pipe", labels), (files / "vectors.npy", files / "pipe")):
        with pytest.raises(ValueError, match=r"pipe is no file of .*a pipe or a device"):
            evaluate_files(vectors, of_labels)
    assert evaluate_files(files / "vectors.npy", labels).at["all", "R@1"] == 1
    labels.write_text("label,dataset,split\n1,p,query\n1,p,gallery\n2,q,query\n2,q,gallery\n")
    table = evaluate_files(vectors, labels)
    assert list(table.index) == ["p", "q", "unified", "harmonic"]
    assert table["queries"].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\nx/a.jpg,1\n", "no label for 3 of 4 vectors, the first 'x/b.jpg'"),
        ("label\n1\n", "1 lines for 4 vectors"),
        ("a,b\n1,2\n", r"columns \['a', 'b'\]; expected label"),
        # By its lines it would fit: the paths would be ignored.
        ("Path,label\n" + 4 * "x/a.jpg,1\n", r"'Path', 'label'\]; .*; rename or remove others"),
        ("label,Dataset\n" + 4 * "1,p\n", r"'label', 'Dataset'\]; .*; rename or remove others"),
        ("label,split\n" + 4 * "1,train\n", "line 2: split 'train'; it must be query, gallery or"),
        (
            "label\n1\n\n1,2,3\n",
            "line 4: 3 cells for the 1 columns label; a cell that holds a comma",
        ),
        # pandas would take the paths for the names of the lines.
        ("path,label\nx/a.jpg,1,\ny/a.jpg,1,\n", "line 2: 3 cells for the 2 columns path, label"),
        ("path,label\nx/a.jpg,1\ny/a.jpg, \nx/b.jpg,\n", r"line 3: no label \(and 1 more lines\)"),
        ("label,split\n1,test\n1,\n", "line 3: no split; fill it, or remove the line"),
        ("label\n1\n1 \n2\n2\n", "line 3: label '1 ' begins or ends with a blank; remove it"),
        ("label,dataset\n1,p\n1, p\n", "line 3: dataset ' p' begins or ends with a blank"),
        ('path,label\na,1\n\n"b\n",1\na,2\n', "line 6: a: this image was given before, in line 2"),
        ("label,label\n1,1\n", "each name can stand once"),
        ('label\n"1\n', "line 2: no file of UTF-8 CSV"),
        ("\n", "is empty; its first line must name columns"),
    ],
)
def test_bad_files_are_named(files, text, message):
    (files / "labels.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        evaluate_files(files / "vectors.npz", files / "labels.csv")
    assert str(files / "labels.csv") in str(caught.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jpg", "b.jpg", "c.jpg", "d.jpg"], "'a.jpg' lies in no folder that would be its class"),
        (["x/a.jpg", "x/b.jpg", "c.jpg", "y/d.jpg"], "'c.jpg' lies in no folder"),
        (
            ["train/x/a.jpg", "train/y/b.jpg", "test/x/a.jpg", "test/y/b.jpg"],
            "the folders test and train are called like splits, and a class of both would be",
        ),
        (
            ["x/train/a.jpg", "x/test/b.jpg", "y/train/a.jpg", "y/test/b.jpg"],
            "the folders test and train are called like splits, and a class of both would be",
        ),
    ],
)
def test_folders_that_are_no_classes_are_refused(files, names, message):
    """Else all would be one class, with R@1 of 100%, or each class two."""
    np.savez(files / "vectors.npz", vectors=angles(0, 90, 1, 91), paths=names)
    with pytest.raises(ValueError, match=f"vectors.npz: .*{message}.*name a file of labels too"):
        evaluate_files(files / "vectors.npz")
    (files / "labels.csv").write_text("label\n1\n2\n1\n2\n")
    assert evaluate_files(files / "vectors.npz", files / "labels.csv").at["all", "R@1"] == 1


def test_paths_of_labels_need_paths_of_vectors(files):
    """Else a table in another order would give each vector the label of another."""
    labels = files / "labels.csv"
    labels.write_text("path,label\nx/a.jpg,1\ny/a.jpg,2\nx/b.jpg,1\ny/b.jpg,2\n")
    assert evaluate_files(files / "vectors.npz", labels).at["all", "R@1"] == 1
    np.save(files / "vectors.npy", angles(0, 90, 1, 91))
    np.savez(files / "pathless.npz", vectors=angles(0, 90, 1, 91))
    for name in ("vectors.npy", "pathless.npz"):
        with pytest.raises(ValueError, match=f"{name} no `paths` to match it with; give an .npz"):
            evaluate_files(files / name, labels)


def test_labels_are_the_text_that_a_file_holds(files):
    """`NA`, `1` and `01` are three classes, in a file as spreadsheets write it."""
    labels = files / "labels.csv"
    text = "path,label\r\nx/a.jpg,NA\r\ny/a.jpg,1\r\nx/b.jpg,NA\r\ny/b.jpg,01\r\n,\r\n"
    labels.write_bytes(text.encode("utf-8-sig"))
    row = evaluate_files(files / "vectors.npz", labels).loc["all"]
    assert row[["R@1", "queries", "excluded"]].tolist() == [1, 2, 2]
    labels.write_bytes(text.encode("utf-16"))
    with pytest.raises(ValueError, match=r"labels\.csv: no file of UTF-8 CSV"):
        evaluate_files(files / "vectors.npz", labels)


def test_bad_vectors_are_named(files):
    (files / "no.npz").write_bytes(b"no numpy")
    with pytest.raises(ValueError, match=r"no\.npz is no file of numpy"):
        evaluate_files(files / "no.npz")
    whole = (files / "vectors.npz").read_bytes()
    (files / "cut.npz").write_bytes(whole[:-9])
    (files / "empty.npy").write_bytes(b"")
    for name in ("cut.npz", "empty.npy"):
        with pytest.raises(ValueError, match=f"{name} is no file of numpy"):
            evaluate_files(files / name)
    np.savez(files / "other.npz", x=angles(0))
    with pytest.raises(ValueError, match=r"other\.npz holds x; expected `vectors`"):
        evaluate_files(files / "other.npz")
    np.save(files / "alone.npy", angles(0))
    with pytest.raises(ValueError, match="has no `paths`: name a file of labels too"):
        evaluate_files(files / "alone.npy")
