"""What is drawn of trained models is what they compute: nearest images, maps, weights of prompts."""

import numpy as np
import pytest
from test_study import PROFILE

from pumalib import analysis, evaluation, models, paths, study, training


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    from dataclasses import replace

    one = replace(PROFILE, seeds=(0,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", tmp_path_factory.mktemp("results"))
        yield study.run_all({"PUMA": one.run("puma"), "specific": study.specific(one.run("linear"))}, one)


def test_specific_models_search_their_own_dataset_and_others_all(results):
    folders = {"PUMA": results.folders["PUMA"][0], "specific": study.members(results.folders["specific"][0])}
    vectors, images = study.embeddings(folders["PUMA"])
    queries = [int(np.flatnonzero(images["dataset"] == name)[3]) for name in ("aircraft", "digits")]
    found = analysis.nearest(folders, PROFILE.data, queries, k=5)
    np.testing.assert_array_equal(found["PUMA"], evaluation.neighbours(vectors, images, queries, 5, within_dataset=False))
    for query, row in zip(queries, found["specific"], strict=True):
        name = images["dataset"].iloc[query]
        own, _ = study.embeddings(folders["specific"][name], PROFILE.data)
        np.testing.assert_array_equal(row, evaluation.neighbours(own, images, [query], 5, within_dataset=True)[0])
        assert set(images["dataset"].iloc[row]) == {name}


def test_weights_of_prompts_are_means_over_the_images_of_a_dataset(results):
    folder = results.folders["PUMA"][0]
    table = analysis.prompt_weights(folder)
    trained = models.load(folder)
    benchmark = training.load_data(trained.run.data)
    images = benchmark.test.reset_index(drop=True)
    _, weights = training.embed(trained.model, benchmark, images, trained.run.data, prompt_weights=True)
    mine = weights[(images["dataset"] == "aircraft").to_numpy(), 6]
    line = table[(table["dataset"] == "aircraft") & (table["prompt"] == 7)].iloc[0]
    assert (line["mean"], line["var"]) == pytest.approx((mine.mean(), mine.var()), rel=1e-3) and line["images"] == len(mine)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_map_has_the_images_of_its_split(results, split):
    points = analysis.tsne(results.folders["PUMA"][0], split, most=40)
    benchmark = training.load_data(PROFILE.data)
    labels = set(getattr(benchmark, split)["label"])
    assert len(points) == 40 and set(points["label"]) <= labels and np.isfinite(points[["x", "y"]]).all(axis=None)
