"""Retrieval metrics against hand-computed values, a plain loop, faiss and pytorch-metric-learning."""

import numpy as np
import pandas as pd
import pytest
import torch

from pumalib.evaluation import KS, evaluate, neighbours, retrieval, scores, unpack


def table(labels, dataset="a", split="test") -> pd.DataFrame:
    n = len(labels)
    columns = {"label": labels, "dataset": dataset, "split": split, "path": [f"{i}.jpg" for i in range(n)]}
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


def nearness(embeddings, distance):
    """(n, n) of the rule: cosines in steps of 2^-30, distances in float32; larger is nearer."""
    x = embeddings.astype(float)
    if distance == "cosine":
        x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        return np.rint(x @ x.T * 2**30)
    return -np.stack([np.sqrt(((x - row) ** 2).sum(1)) for row in x]).astype(np.float32)


def plain_loop(embeddings, images, ks, distance="cosine"):
    """Every definition spelt out, query by query: values per dataset and unified, as `Scores.values`."""
    near, rows = nearness(embeddings, distance), images.reset_index(drop=True)
    key = list(zip(rows.dataset, rows.label))
    found = {}
    for name in [*dict.fromkeys(rows.dataset), "unified"]:
        mine = np.ones(len(rows), bool) if name == "unified" else (rows.dataset == name).to_numpy()
        lines = []
        for q in np.flatnonzero(mine & (rows.split != "gallery")):
            gallery = [g for g in np.flatnonzero(mine & (rows.split != "query")) if g != q]
            hits = [key[g] == key[q] for g in sorted(gallery, key=lambda g: -near[q, g])]  # sorted() is stable
            size = sum(hits)
            if size:
                precision = [sum(hits[: i + 1]) / (i + 1) * hits[i] for i in range(size)]
                lines.append([float(any(hits[:k])) for k in ks] + [sum(hits[:size]) / size, sum(precision) / size])
        found[name] = np.array(lines)
    return found


def test_relevance_1_0_1_of_three():
    """R = 3 and relevance 1, 0, 1 give RP 2/3 and MAP@R (1 + 2/3) / 3 = 5/9."""
    images = table([0, 0, 1, 0, 0, 1], split=["query"] + ["gallery"] * 5)
    result = evaluate(angles(0, 1, 2, 3, 90, 80), images, ks=(1, 2))
    assert result.loc["a", ["R@1", "R@2", "RP", "MAP@R"]].tolist() == pytest.approx([1, 1, 2 / 3, 5 / 9])
    assert result.index.tolist() == ["a", "unified", "harmonic"] and (result["excluded"] == 0).all()


def test_recall_grows_with_k_and_k_may_exceed_the_gallery():
    images = table([0, 1, 1, 0], split=["query", "gallery", "gallery", "gallery"])
    result = evaluate(angles(0, 1, 2, 3), images, ks=(1, 2, 4, 8), bootstrap=0)
    assert result.loc["a", ["R@1", "R@2", "R@4", "R@8"]].tolist() == [0, 0, 1, 1]
    assert result.loc["a", ["R@1_low", "RP_high"]].isna().all()


def test_self_is_removed_even_when_k_spans_the_gallery():
    images = table([0, 1, 1])  # the query of class 0 has no other; those of class 1 have each other
    result = evaluate(angles(0, 10, 20), images, ks=(1, 8))
    assert result.loc["a", ["R@1", "R@8", "RP", "MAP@R"]].tolist() == [0.5, 1, 0.5, 0.5]  # image 1 is nearest to 0
    assert (result[["queries", "excluded"]] == [2, 1]).all(axis=None)


def test_duplicate_of_the_query_stays_in_the_gallery():
    """Rows 0 and 1 are the same picture: whichever is the query, the other is its nearest neighbour."""
    images = table([0, 0, 1, 1])
    same = np.array([[1, 0], [1, 0], [1, 0.1], [0, 1]], dtype=np.float32)
    assert neighbours(same, images, [0, 1], k=3).tolist() == [[1, 2, 3], [0, 2, 3]]
    relabelled = table([0, 1, 0, 1])  # dropping the first column would drop row 0 instead of the query, row 1
    assert neighbours(same, relabelled, [1], k=1).tolist() == [[0]]
    assert evaluate(same, images, bootstrap=0).loc["a", "R@1"] == 0.5 + 0.25  # row 2 finds row 0, row 3 finds row 2


@pytest.mark.parametrize("block", [1, 1000, 2**24])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_ties_rank_by_gallery_order_in_every_block(block, distance, monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", block)
    points = np.random.default_rng(3).normal(size=(5, 33)).astype(np.float32)
    embeddings, images = points[np.arange(200) % 5], table(np.arange(200) % 7)
    found = neighbours(embeddings, images, np.arange(200), k=11, distance=distance)
    for row in range(200):  # the first eleven other copies of the same point, in order
        assert found[row].tolist() == [other for other in range(row % 5, 200, 5) if other != row][:11]


def test_collapsed_embeddings_rank_by_gallery_order():
    images = table([0, 1, 1, 0])
    assert neighbours(np.zeros((4, 3)), images, [0, 3], k=3).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert evaluate(np.ones((4, 3)), images, ks=(1,), bootstrap=0).loc["a", "R@1"] == 0.25  # only row 3 finds row 0


KINDS = {  # what float32 tells apart well, badly, and not at all
    "clustered": lambda x, rng: x,
    "duplicates": lambda x, rng: x[rng.integers(len(x) // 7, size=len(x))],
    "near ties": lambda x, rng: x[rng.integers(9, size=len(x))].astype(float) + 1e-8 * rng.normal(size=x.shape),
    "far from zero": lambda x, rng: 1e-3 * x.astype(float) + 100,
}


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("split", ["test", "inshop"])
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_plain_loop(kind, split, distance, monkeypatch):
    monkeypatch.setattr(retrieval, "QUERIES", 64)
    embeddings, images = random_case(classes=6)
    embeddings = KINDS[kind](embeddings, rng := np.random.default_rng(1))
    images.loc[images.label == 5, "label"] = np.arange((images.label == 5).sum()) + 5  # classes of very few, too
    if split == "inshop":
        images["split"] = rng.choice(["query", "gallery", "test"], size=len(images))
    expected = plain_loop(embeddings, images, KS, distance)
    for spare, shallow in ((8, 8), (0, 1), (200, 100)):
        monkeypatch.setattr(retrieval, "SPARE", spare)
        monkeypatch.setattr(retrieval, "SHALLOW", shallow)
        found = scores(embeddings, images, KS, distance=distance)
        assert list(found.values) == list(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(found.values[name][:, : len(KS)], values[:, : len(KS)])
            np.testing.assert_allclose(found.values[name], values, rtol=1e-13)


def test_only_what_float32_cannot_tell_is_searched_in_float64(monkeypatch):
    asked, original = [], retrieval._similarities

    def counted(queries, gallery, distance):
        asked.extend([len(queries)] * (queries.ndim == 2))  # 2 dimensions: against the whole gallery
        return original(queries, gallery, distance)

    monkeypatch.setattr(retrieval, "_similarities", counted)
    embeddings, images = random_case(n=1000, dim=32, datasets=("a",), classes=100)
    scores(embeddings, images)
    assert sum(asked) == 0
    embeddings[:40] = embeddings[0]  # more copies than there are spare neighbours
    scores(embeddings, images)
    assert 40 <= sum(asked) <= 200


def test_one_dataset_is_searched_once(monkeypatch):
    searched, original = [], retrieval.faiss.knn
    monkeypatch.setattr(
        retrieval.faiss, "knn", lambda q, g, *a, **b: searched.append(len(q)) or original(q, g, *a, **b)
    )
    embeddings, images = random_case(datasets=("a",))
    found = scores(embeddings, images)
    assert sum(searched) == len(embeddings)
    np.testing.assert_array_equal(found.values["a"], found.values["unified"])
    assert (unpack(found.packed("R@4")["a"], len(found.values["a"])) == found.values["a"][:, 2]).all()


@pytest.mark.parametrize("split", ["test", "inshop"])
def test_against_pytorch_metric_learning(split):
    accuracy_calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.inference import CustomKNN

    names = {"precision_at_1": "R@1", "r_precision": "RP", "mean_average_precision_at_r": "MAP@R"}
    calculator = accuracy_calculator.AccuracyCalculator(
        include=tuple(names), k="max_bin_count", device=torch.device("cpu"), knn_func=CustomKNN(CosineSimilarity())
    )
    embeddings, images = random_case(seed=7, datasets=("a",))
    points, labels = torch.tensor(embeddings), torch.tensor(images["label"].to_numpy())
    if split == "test":
        theirs = calculator.get_accuracy(points, labels)
    else:
        images["split"] = np.where(np.arange(len(images)) < 100, "query", "gallery")
        theirs = calculator.get_accuracy(points[:100], labels[:100], points[100:], labels[100:])
    ours = evaluate(embeddings, images, bootstrap=0).loc["a"]
    for name, metric in names.items():
        assert ours[metric] == pytest.approx(theirs[name], abs=1e-12), metric


def test_unified_match_needs_dataset_and_class():
    """Labels collide between datasets: the nearest image has the same label, but is of the other dataset."""
    images = table([0, 0, 0, 0], dataset=["a", "b", "a", "b"])
    result = evaluate(angles(0, 1, 30, 31), images, ks=(1, 2), bootstrap=0)
    assert result.loc[["a", "b"], "R@1"].tolist() == [1, 1]
    assert result.loc["unified", ["R@1", "R@2", "RP"]].tolist() == [0, 0.5, 0]


def test_harmonic_row_is_zero_where_a_dataset_is():
    images = table([0, 0, 1, 1, 2, 2, 3, 3], dataset=["a"] * 4 + ["b"] * 4)
    result = evaluate(angles(0, 20, 1, 21, 100, 101, 150, 151), images, ks=(1,))  # "a": always the other class
    assert result["R@1"].to_dict() == {"a": 0, "b": 1, "unified": 0.5, "harmonic": 0}
    assert result.loc["harmonic", ["R@1_low", "R@1_high"]].tolist() == [0, 0]


def test_bootstrap_of_a_tiny_case():
    """Four queries, three right: a resample's mean is binomial(4, 3/4) / 4, which is 0 with probability 0.4 %,
    at most 1/4 with 5.1 %, and 1 with 31.6 %: the 2.5 % point is 1/4 and the 97.5 % point 1."""
    images = table([0, 1, 2, 2, 0, 1, 2], split=["query"] * 4 + ["gallery"] * 3)
    result = evaluate(angles(0, 45, 0, 90, 0, 45, 90), images, ks=(1,), bootstrap=4000)
    assert result.loc["a", ["R@1_low", "R@1", "R@1_high"]].tolist() == [0.25, 0.75, 1.0]


def test_bootstrap_intervals():
    embeddings, images = random_case(seed=2)
    result = evaluate(embeddings, images, bootstrap=300)
    assert (result["RP_low"] < result["RP"]).all() and (result["RP"] < result["RP_high"]).all()
    unified, count = result.loc["unified"], result.loc["unified", "queries"]
    expected = 2 * 1.96 * np.sqrt(unified["R@1"] * (1 - unified["R@1"]) / count)  # width of a normal interval
    assert unified["R@1_high"] - unified["R@1_low"] == pytest.approx(expected, rel=0.15)
    other = evaluate(embeddings, images, bootstrap=300, seed=1)
    assert (other["RP"] == result["RP"]).all() and (other["RP_low"] != result["RP_low"]).all()


@pytest.mark.parametrize("sign", [1, -1])  # a function may return the negative of a similarity
def test_distance_as_function(sign, monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", 10_000)
    embeddings, images = random_case(seed=4)
    asked = []

    def city_block(a, b):
        asked.append((len(a), len(b)))
        return sign * torch.cdist(a, b, p=1)

    result = evaluate(embeddings, images, distance=city_block, bootstrap=0)
    assert all(q * g <= 10_000 for q, g in asked) and len(asked) > 4
    points = torch.tensor(embeddings).double()
    nearest = (sign * torch.cdist(points, points, p=1)).fill_diagonal_(torch.inf).argmin(1)
    same = (images[["dataset", "label"]].to_numpy() == images[["dataset", "label"]].to_numpy()[nearest]).all(1)
    assert result.loc["unified", "R@1"] == pytest.approx(same.sum() / result.loc["unified", "queries"])
    with pytest.raises(ValueError, match="must return .* finite numbers"):
        evaluate(embeddings, images, distance=lambda a, b: torch.cdist(a, b) * torch.nan)


def test_neighbours_within_and_across_datasets():
    images = table([0, 0, 0, 1], dataset=["a", "b", "a", "b"], split=["query", "test", "gallery", "test"])
    embeddings = angles(0, 1, 2, 3)
    assert neighbours(embeddings, images, [0], k=1).tolist() == [[2]]
    assert neighbours(embeddings, images, [1, 0], k=2, within_dataset=False).tolist() == [[2, 3], [1, 2]]
    with pytest.raises(ValueError, match="dataset 'a' has 1 gallery images, too few for k=2"):
        neighbours(embeddings, images, [0], k=2)


def test_inputs_of_every_kind_agree():
    embeddings, images = random_case(seed=6)
    embeddings = embeddings.astype(np.float16).astype(np.float32)
    expected = evaluate(embeddings, images, bootstrap=0)
    frozen = embeddings.copy()
    frozen.setflags(write=False)
    for same in (frozen, embeddings.tolist(), torch.tensor(embeddings, requires_grad=True), embeddings.astype("f2")):
        pd.testing.assert_frame_equal(evaluate(same, images, bootstrap=0), expected)


def test_bad_input():
    embeddings, images = random_case(n=20)
    with pytest.raises(ValueError, match=r"shape \(19, 6\) for a table of 20 images"):
        evaluate(embeddings[:19], images)
    broken = embeddings.copy()
    broken[7, 2] = np.nan
    with pytest.raises(ValueError, match=f"1 embeddings are not finite, first that of row 7 .*{images.path.iloc[7]}"):
        evaluate(broken, images)
    for change, message in (
        ({"split": "train"}, "split .'train'. cannot be evaluated; known: test, query, gallery"),
        ({"split": "query"}, "has no gallery image"),
        ({"label": np.arange(20)}, "no query has another image of its class"),
        ({"dataset": "unified"}, "rename it"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(embeddings, images.assign(**change))
    with pytest.raises(ValueError, match="unknown distance 'l1'; known: cosine, euclidean"):
        evaluate(embeddings, images, distance="l1")
    with pytest.raises(ValueError, match="ks must be positive"):
        evaluate(embeddings, images, ks=(0, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_gives_the_same_table():
    embeddings, images = random_case(seed=8, n=2000)
    on_gpu = evaluate(embeddings, images, bootstrap=50, device="cuda")
    pd.testing.assert_frame_equal(on_gpu, evaluate(embeddings, images, bootstrap=50))
