"""A trained model for others: a folder that needs nothing else, ONNX, and the one in the box."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import pumalib
from puma_study import store
from puma_study.__main__ import main
from pumalib import config, data, embedder, evaluation, export, models, paths
from pumalib.embedder import Embedder
from pumalib.training import run_name
from tools import pages

RUN = config.Run(
    data=config.Data(
        benchmark="folders", root="/my/own/images", split="/my/list.csv", image_size=48
    ),
    method=config.METHODS["puma"],
    dim=16,
    pretrained="random",
)
KEPT = Path(pumalib.__file__).parent / "kept"


def embedder_of(run=RUN, seed=0):
    torch.manual_seed(seed)
    model = models.build(run.method, run.backbone, run.dim, pretrained="random")
    return Embedder(model.eval(), run)


@pytest.fixture(scope="module")
def model():
    return embedder_of()


@pytest.fixture(scope="module")
def pictures():
    """Three smooth pictures of 40 x 50."""
    made = []
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        made.append(Image.fromarray(noise).resize((50, 40), Image.Resampling.BICUBIC))
    return made


# ---- a folder


def test_a_saved_folder_is_the_model_wherever_it_goes(model, pictures, tmp_path):
    weights = tmp_path / "weights.safetensors"
    shutil.copy(paths.MINI / "mini_vit.safetensors", weights)
    run = replace(RUN, pretrained=str(weights))
    torch.manual_seed(0)
    network = models.build(run.method, run.backbone, run.dim, pretrained=run.pretrained)
    ours = Embedder(network.eval(), run)
    folder = ours.save(tmp_path / "mine", about="Trained on my own images.")
    expected = ours.embed(pictures)

    weights.unlink()
    moved = folder.rename(tmp_path / "elsewhere")
    found = pumalib.load(moved)
    assert np.array_equal(found.embed(pictures), expected)
    assert sorted(file.name for file in moved.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    for file in moved.iterdir():
        content = file.read_bytes()
        assert str(tmp_path).encode() not in content, "no place of the machine that trained it"
        assert b"/my/own" not in content and b"/my/list" not in content
    assert "Trained on my own images." in (moved / "README.md").read_text()
    described = json.loads((moved / "config.json").read_text())
    assert described["embedding_dim"] == 16 and described["method"] == "puma"
    assert described["preprocessing"]["resize"] == [55, 55]

    assert np.array_equal(pumalib.load(found.save(tmp_path / "again")).embed(pictures), expected)


def test_half_is_half_as_large_and_nearly_the_same(model, pictures, tmp_path):
    whole = model.save(tmp_path / "whole") / "model.safetensors"
    half = model.save(tmp_path / "half", half=True) / "model.safetensors"
    assert half.stat().st_size < 0.51 * whole.stat().st_size
    found = pumalib.load(half.parent)
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    np.testing.assert_allclose(found.embed(pictures), model.embed(pictures), atol=5e-3)


# ---- the start of another


@pytest.fixture
def trained(model, tmp_path):
    return model.save(tmp_path / "trained")


def test_a_trained_model_is_the_start_of_another(model, trained):
    torch.manual_seed(1)
    build = models.build
    went_on = build("puma", "mini_vit", 16, pretrained=str(trained), image_size=48)
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(went_on.state_dict()[name], tensor), name
    wider = build("puma", "mini_vit", 32, pretrained=trained)
    assert wider.head.weight.shape == (32, 128), "a head of another shape begins anew"
    assert torch.equal(wider.prompt.prompts, model.model.prompt.prompts)


def test_a_tuned_backbone_is_the_start_of_any_method(tmp_path):
    tuned = embedder_of(replace(RUN, method=config.METHODS["full"]), seed=3)
    folder = tuned.save(tmp_path / "full")
    new = models.build("puma", "mini_vit", 16, pretrained=folder)
    for name, tensor in tuned.model.backbone.state_dict().items():
        assert torch.equal(new.backbone.state_dict()[name], tensor), name
    # Frozen, it is not in the file of what begins from it, and is found again by the run.
    run = replace(RUN, pretrained=str(folder))
    models.save(new, run, tmp_path / "run")
    x = torch.randn(2, 3, 48, 48)
    assert torch.equal(pumalib.load(tmp_path / "run").model(x), new.eval()(x))


def test_a_start_that_does_not_fit_is_refused_with_the_remedy(trained, tmp_path):
    with pytest.raises(
        ValueError, match="is a model of 'puma', whose .* 'full' has not: train 'puma'"
    ):
        models.build("full", "mini_vit", 16, pretrained=trained)
    with pytest.raises(ValueError, match="is a model of 'mini_vit' at 48 px, not 'mini_vit_64'"):
        models.build("puma", "mini_vit_64", 16, pretrained=trained)
    with pytest.raises(FileNotFoundError, match="no weights at .*empty/model.safetensors"):
        (tmp_path / "empty").mkdir()
        models.build("puma", "mini_vit", 16, pretrained=tmp_path / "empty")


def test_the_name_of_a_run_knows_the_model_it_begins_from(trained, model, tmp_path):
    run = config.Run(data=config.Data(datasets=("photos",), image_size=48), pretrained=str(trained))
    name = run_name(run)
    moved = shutil.copytree(trained, tmp_path / "copy")
    assert run_name(replace(run, pretrained=str(moved))) == name
    other = embedder_of(seed=5).save(tmp_path / "other")
    assert run_name(replace(run, pretrained=str(other))) != name


# ---- ONNX


@pytest.mark.parametrize("method", ["puma", "lora"])
def test_onnx_gives_the_embeddings_of_torch(method, pictures, tmp_path):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ours = embedder_of(replace(RUN, method=config.METHODS[method]))
    file = ours.to_onnx(tmp_path / "model.onnx")

    metadata = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    steps = json.loads(metadata["preprocessing"])
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    # The pre-processing as the metadata has it, by Pillow and numpy alone.
    shown = []
    for picture in pictures:
        large = np.asarray(picture.resize(steps["resize"], Image.Resampling.BICUBIC))
        crop = steps["centre_crop"]
        start = round((len(large) - crop) / 2)
        shown.append(large[start : start + crop, start : start + crop].transpose(2, 0, 1))
    expected = ours.embed(pictures)
    (found,) = session.run(None, {"pixels": np.stack(shown)})
    np.testing.assert_allclose(found, expected, atol=1e-4)
    (one,) = session.run(None, {"pixels": shown[0][None]})
    np.testing.assert_allclose(one, expected[:1], atol=1e-4)
    assert next(ours.model.parameters()).device.type == "cpu"


def test_onnx_that_differs_is_not_written(model, tmp_path, monkeypatch):
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    exact = export._by_torch
    monkeypatch.setattr(export, "_by_torch", lambda *given: exact(*given) + 2e-4)
    with pytest.raises(RuntimeError, match="differ from torch's by 2.0e-04, more than 0.0001"):
        model.to_onnx(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


# ---- what was trained alone


@pytest.fixture
def on_test_vit(tmp_path):
    """PUMA on a small vision transformer of timm's, whose weights lie in a file."""
    weights = tmp_path / "weights.safetensors"
    torch.manual_seed(3)
    backbone = models.backbones.create("test_vit", "random")
    safetensors.torch.save_file(backbone.state_dict(), weights)
    images = replace(RUN.data, image_size=32)
    run = replace(RUN, data=images, backbone="test_vit", pretrained=str(weights))
    network = models.build(run.method, "test_vit", 16, pretrained=weights, image_size=32)
    return Embedder(network.eval(), run), weights


def test_the_trained_part_is_put_onto_the_backbone_of_a_file(on_test_vit, pictures, tmp_path):
    ours, weights = on_test_vit
    folder = ours.save_trained(tmp_path / "parts", about="## Data\n\nNone.")
    names = safetensors.torch.load_file(folder / "model.safetensors").keys()
    assert not [name for name in names if name.startswith("backbone.")]
    for file in folder.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), "no place of this machine"
    again = pumalib.load(folder, pretrained=weights)
    np.testing.assert_allclose(again.embed(pictures), ours.embed(pictures), atol=1e-6)
    assert 'pretrained="<its weights>.safetensors"' in (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text())["backbone_included"] is False


def test_without_a_file_the_hub_is_asked_and_other_weights_are_refused(
    on_test_vit, pictures, tmp_path, monkeypatch
):
    ours, weights = on_test_vit
    folder = ours.save_trained(tmp_path / "parts")
    asked = []
    from_timm = models.backbones._from_timm

    def hub(name, pretrained, image_size, pooling):
        asked.append(pretrained)
        made = from_timm(name, False, image_size, pooling)
        if pretrained and len(asked) == 1:
            outline = models.backbones._outline(name, image_size, pooling)
            made.load_state_dict(models.backbones._fitting(weights, name, outline, image_size))
        return made

    monkeypatch.setattr(models.backbones, "_from_timm", hub)
    np.testing.assert_allclose(
        pumalib.load(folder).embed(pictures), ours.embed(pictures), atol=1e-6
    )
    assert asked == [True]
    with pytest.raises(ValueError, match="adapts another backbone .* give pretrained="):
        pumalib.load(folder)


def test_a_backbone_of_its_own_is_saved_whole(on_test_vit, tmp_path):
    ours, _ = on_test_vit
    for changes in ({"pretrained": "random"}, {"pretrained": str(KEPT / "mini")}):
        other = Embedder(ours.model, replace(ours.run, **changes))
        with pytest.raises(ValueError, match="save the whole model"):
            other.save_trained(tmp_path / "parts")
    torch.manual_seed(0)
    full = models.build("full", "mini_vit", 16, pretrained="embedded")
    run = replace(RUN, method=config.METHODS["full"], pretrained="embedded")
    with pytest.raises(ValueError, match="'full' .* save the whole model"):
        Embedder(full, run).save_trained(tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def _trials_program():
    place = paths.ROOT / "data" / "photos-8" / "kept.py"
    spec = importlib.util.spec_from_file_location("photos_8_kept", place)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_the_trials_program_keeps_a_run_by_a_name(tmp_path, monkeypatch, capsys, pictures):
    """Of another profile, as the trial's models are not trained here."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    assert main(["runs", "train", "linear", "--profile", "smoke"]) == 0
    (folder,) = (tmp_path / "results" / "smoke" / "runs").glob("linear-*")
    program = _trials_program()
    place = tmp_path / "kept" / "small-linear"
    program.keep(folder, place, "smoke")

    assert (place / "model.safetensors").stat().st_size < program.MOST_BYTES
    card = (place / "README.md").read_text()
    for heading in ("Data", "Scores", "Licence", "Intended use", "How it was made"):
        assert f"\n## {heading}\n" in card
    unified = 100 * pumalib.read_scores(folder).at["unified", "R@1"]
    assert f"| unified | {unified:.1f} [" in card
    monkeypatch.setattr(embedder, "KEPT_FOLDER", tmp_path / "kept")
    assert pumalib.list_models() == ["small-linear"]
    np.testing.assert_allclose(
        pumalib.load("small-linear").embed(pictures), pumalib.load(folder).embed(pictures)
    )

    other = folder.with_name("linear-curricularface-00000000")
    with pytest.raises(ValueError, match="no run 'linear-curricularface-00000000' is kept"):
        program.keep(other, tmp_path / "kept" / "other", "smoke")
    monkeypatch.setattr(program, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1,000: not kept"):
        program.keep(folder, tmp_path / "kept" / "large", "smoke")
    kept = store.record(folder.name, "smoke")
    other = SimpleNamespace(accuracies={"unified": kept.accuracy("unified") + 0.1})
    monkeypatch.setattr(store, "record", lambda name, profile: other)
    with pytest.raises(ValueError, match="it is another model"):
        program.keep(folder, tmp_path / "kept" / "other", "smoke")
    assert [one.name for one in (tmp_path / "kept").iterdir()] == ["small-linear"]


# ---- the model in the box


def test_the_kept_model_has_the_scores_that_its_card_says():
    model = pumalib.load("mini")
    benchmark = data.load(model.run.data)
    test = benchmark.test
    vectors = embedder.embed_rows(model.model, benchmark, test, model.run.data)
    table = evaluation.scores(vectors, test, (1,)).table(bootstrap=0)
    card = (KEPT / "mini" / "README.md").read_text()
    said = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \[", card, re.MULTILINE))
    assert said.keys() == set(table.index)
    for name, row in table.iterrows():
        # A processor that rounds otherwise may move a query or two.
        assert abs(float(said[name]) - 100 * row["R@1"]) < 0.3, name


def test_every_kept_model_has_a_card_and_is_small():
    assert sorted(folder.name for folder in KEPT.iterdir()) == sorted(pumalib.list_models())
    for name in pumalib.list_models():
        folder = KEPT / name
        assert (folder / "model.safetensors").stat().st_size < 4 * 2**20
        card = (folder / "README.md").read_text()
        for heading in ("Data", "Scores", "Licence", "Intended use"):
            assert f"\n## {heading}\n" in card
        # Of other models it is docs/own-images.md that has all.
        table = re.findall(r"^\| \| signs .*?\n\n", card, re.MULTILINE | re.DOTALL)
        assert table == [pages.rows_elsewhere(name) + "\n\n"]
        assert len(table[0].split("\n")) == 2 + 4 + 2
        assert json.loads((folder / "config.json").read_text())["library_name"] == "pumalib"


def test_a_frozen_backbone_is_an_embedder(pictures):
    model = pumalib.frozen("test_vit", "random", image_size=32)
    vectors = model.embed(pictures)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert model.view.upright
    with pytest.raises(ValueError, match="unknown backbone 'vit_smal'"):
        pumalib.frozen("vit_smal")
