"""Backbones as timm has them: features, sizes, transforms; files of weights that do not fit.

`pytest tests/test_backbones.py --families` compares the smallest model of each of timm's families,
in half an hour, in place of a selection.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

import pumalib
from pumalib import config, embedder, export, models
from pumalib.config import Data
from pumalib.data.images import View, normalise, pixels
from pumalib.models import backbones

# One for each way in which families differ, and a size that is not its own.
FAMILIES = {
    # Fused attention pooling; registers; two classifiers; positions of several kinds.
    "vit_tiny_patch16_224": 160,
    "vit_xsmall_patch16_clip_224": 160,
    "test_vit3": 128,
    "vit_tiny_patch16_dinov3_qkvb": 160,
    "deit_tiny_distilled_patch16_224": 160,
    "eva02_tiny_patch14_224": 112,
    "cait_xxs24_224": 160,
    "levit_128s": 160,
    "gmlp_ti16_224": 160,
    "swin_tiny_patch4_window7_224": 112,
    "mobilevit_xxs": 128,
    # Layers behind the pooling.
    "lcnet_035": 128,
    "ghostnet_050": 128,
    "hgnetv2_b0": 128,
    "test_mambaout": 128,
    # Classifiers of other names.
    "test_convnext": 128,
    "test_efficientnet": 128,
    "densenet121": 96,
    "regnetx_002": 128,
    "test_nfnet": 128,
    "test_resnet": 128,
    "test_byobnet": 128,
    "pvt_v2_b0": 160,
}
# Larger than this is not made here, in parameters.
MOST = 130_000_000


def smallest_of_each_family():
    chosen = {}
    for family in timm.list_modules():
        sizes = {}
        for name in timm.list_models(module=family):
            with torch.device("meta"):
                sizes[name] = models.count_parameters(timm.create_model(name, num_classes=0))[1]
        name = min(sizes, key=sizes.__getitem__)
        if sizes[name] <= MOST:
            own = timm.get_pretrained_cfg(name).input_size[-1]
            chosen[name] = {224: 160, 256: 192}.get(own, 128)
    return chosen


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--families")
        chosen = smallest_of_each_family() if whole else FAMILIES
        metafunc.parametrize("family", chosen.items(), ids=list(chosen))


def by_timm(name, file, **options):
    """Timm's own model, by timm's own loading of a file."""
    overlay = {"file": str(file)}
    return timm.create_model(
        name, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay, **options
    ).eval()


def assert_same_features(name, file, size, **options):
    model = pumalib.frozen(name, file, size)
    images = torch.randn(2, 3, *[model.run.data.image_size] * 2)
    with torch.inference_mode():
        expected = F.normalize(by_timm(name, file, **options)(images), dim=-1).numpy()
    found = model.embed(list(images), prepared=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_features_are_those_of_timm_at_its_size_and_at_another(family, tmp_path):
    name, other = family
    file = tmp_path / "weights.pth"
    torch.save(timm.create_model(name).state_dict(), file)
    assert_same_features(name, file, None)

    plain = timm.models.model_entrypoint(name).__module__.endswith(("vision_transformer", "deit"))
    if not plain and not timm.get_pretrained_cfg(name).fixed_input_size:
        # It is the same model.
        return
    options = {"img_size": other}
    try:
        by_timm(name, file, **options)(torch.zeros(2, 3, other, other))
    except Exception:
        with pytest.raises(ValueError, match=rf"image_size = {other}.*its own (size )?is \d+"):
            pumalib.frozen(name, file, other)
    else:
        assert_same_features(name, file, other, **options)


# ---- files of weights


def saved(name, file, change=None, **options):
    state = timm.create_model(name, **options).state_dict()
    if change is not None:
        change(state)
    torch.save(state, file)
    return file


def nan(state):
    state["blocks.0.mlp.fc1.bias"][3] = float("nan")


def infinite(state):
    state["norm.weight"][0] = float("inf")


def shallow(state):
    for key in [key for key in state if key.startswith("blocks.11.")]:
        del state[key]


def no_numbers(state):
    state["head.weight"] = "lost"


TINY = "vit_tiny_patch16_224"
UNFIT = {
    "patches of another size": ("vit_small_patch16_224", "vit_small_patch32_224", {}),
    "patches of another size; name": ("vit_small_patch32_224", "vit_small_patch16_224", {}),
    "pos_embed is .1, 577, 192., not .1, 197, 192.": (TINY, "vit_tiny_patch16_384", {}),
    "size mismatch for patch_embed.proj.weight": (TINY, TINY, {"in_chans": 1}),
    "size mismatch for cls_token": (TINY, "vit_small_patch16_224", {}),
    "Missing key.*blocks.11": (TINY, TINY, {"change": shallow}),
    "Unexpected key.*blocks.12": (TINY, TINY, {"depth": 13}),
    "its blocks.0.mlp.fc1.bias is not finite": (TINY, TINY, {"change": nan}),
    "its norm.weight is not finite": (TINY, TINY, {"change": infinite}),
    "it holds .*; save the part of it": (TINY, TINY, {"change": no_numbers}),
}


def test_a_bound_may_be_infinite_where_it_is_so_in_a_new_model(tmp_path):
    # As those of timm's gemma4.
    model = torch.nn.Linear(1, 1)
    model.register_buffer("bound", torch.tensor(float("inf")))
    state = model.state_dict()
    backbones._load(model, state, tmp_path / "weights.pth", "a model")
    state["bound"] = torch.tensor(float("-inf"))
    with pytest.raises(ValueError, match=r"weights\.pth is of no use: its bound is not finite"):
        backbones._load(model, state, tmp_path / "weights.pth", "a model")


@pytest.mark.parametrize("message", UNFIT)
def test_weights_of_another_model_are_refused_with_the_reason(message, tmp_path):
    name, other, options = UNFIT[message]
    file = saved(other, tmp_path / "weights.pth", **options)
    with pytest.raises(ValueError, match=message):
        pumalib.frozen(name, file)
    if "pos_embed" in message:
        # Of a third size, neither the file's nor the model's own.
        with pytest.raises(ValueError, match="for images of another size"):
            pumalib.frozen(name, file, 128)


def test_patches_of_another_size_are_refused_in_files_of_jax(tmp_path):
    file = tmp_path / "weights.npz"
    np.savez(file, **{"embedding/kernel": np.zeros((32, 32, 3, 192), np.float32)})
    with pytest.raises(ValueError, match="patches of another size"):
        pumalib.frozen(TINY, file)


def test_positions_for_this_size_or_the_models_own_are_taken(tmp_path):
    file = saved(TINY, tmp_path / "small.pth", img_size=128)
    stored = torch.load(file)["pos_embed"]
    model = pumalib.frozen(TINY, file, 128)
    torch.testing.assert_close(model.model.backbone.pos_embed.detach(), stored)
    with pytest.raises(ValueError, match="for images of another size"):
        pumalib.frozen(TINY, file)


def test_a_small_file_of_a_huge_model_asks_for_no_memory(tmp_path, monkeypatch):
    file = saved("test_vit", tmp_path / "weights.pth")

    def made(*arguments):
        raise AssertionError("memory was asked for")

    monkeypatch.setattr(backbones, "_from_timm", made)
    with pytest.raises(ValueError, match="does not fit backbone 'vit_gigantic_patch14_224'"):
        backbones.create("vit_gigantic_patch14_224", file)


def test_a_model_that_begins_from_itself_is_refused(tmp_path):
    weights = saved("test_vit", tmp_path / "weights.pth")
    run = config.Run(
        data=Data(benchmark="folders", image_size=32),
        backbone="test_vit",
        pretrained=str(weights),
        method=config.METHODS["linear"],
        dim=8,
    )
    model = models.build("linear", "test_vit", 8, pretrained=weights, image_size=32)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, other in zip(folders, [folders[1], folders[1]]):
        folder.mkdir()
        models.save(model, replace(run, pretrained=str(other)), folder)
    for folder in folders:
        with pytest.raises(ValueError, match=r"takes its backbone from .*, and that from itself"):
            pumalib.load(folder)
    assert pumalib.load(folders[1], pretrained=weights).model.dim == 8


# ---- pooling of runs


def test_a_run_pools_as_in_table_10_unless_it_says_otherwise(tmp_path):
    run = config.Run(backbone="test_resnet", pretrained="random")
    as_timm = replace(run, pooling="timm")
    assert run.fingerprint("", "") != as_timm.fingerprint("", "")
    images = torch.randn(2, 3, 64, 64)
    grids = {}
    for one in (run, as_timm):
        torch.manual_seed(0)
        model = models.build(
            "pretrained", one.backbone, pretrained="random", image_size=64, pooling=one.pooling
        ).eval()
        grid = model.backbone.forward_features(images)
        grids[one.pooling] = model(images), grid.mean((2, 3)), grid.amax((2, 3))
    found, mean, maximum = grids["avgmax"]
    torch.testing.assert_close(found, F.normalize((mean + maximum) / 2, dim=-1))
    found, mean, _ = grids["timm"]
    torch.testing.assert_close(found, F.normalize(mean, dim=-1))


@pytest.mark.parametrize("name", ["lcnet_035", "ghostnet_050", "hgnetv2_b0"])
def test_a_head_is_as_wide_as_what_it_is_given(name):
    model = models.build("linear", name, 8, pretrained="random", image_size=64).eval()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 8)


def test_a_pooling_that_a_model_cannot_have_is_refused_with_the_other():
    with pytest.raises(ValueError, match=r"pooling = 'avgmax' .*its own is 224, and pooling 'timm"):
        backbones.create("pvt_v2_b0", "random")
    assert backbones.features_width(backbones.create("pvt_v2_b0", "random", pooling="timm")) == 256


# ---- what a backbone is shown


@pytest.fixture(scope="module")
def photo():
    noise = np.random.default_rng(0).integers(0, 256, (9, 13, 3)).astype(np.uint8)
    return Image.fromarray(noise).resize((417, 301), Image.Resampling.BICUBIC)


def transform_of(model):
    settings = timm.data.resolve_model_data_config(model)
    return timm.data.create_transform(**settings, is_training=False)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "regnetx_002", "test_convnext"])
def test_an_image_is_shown_as_by_timms_own_transform(name, photo):
    model = pumalib.frozen(name, "random")
    expected = transform_of(model.model.backbone)(photo)
    assert model.run.data.image_size == expected.shape[-1]
    shown = normalise(pixels(photo, model.view)[None], model.view)[0]
    torch.testing.assert_close(shown, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("share, interpolation", [(0.9, "bicubic"), (1.0, "bilinear")])
@pytest.mark.parametrize("shape", [(417, 301), (30, 200), (64, 64)])
def test_every_way_of_cropping_is_timms(mode, share, interpolation, shape, photo):
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    view = View(Data(image_size=64, resize="timm"), mean, std, False, share, mode, interpolation)
    whole = timm.data.create_transform(
        64, mean=mean, std=std, crop_pct=share, crop_mode=mode, interpolation=interpolation
    )
    picture = photo.resize(shape)
    shown = normalise(pixels(picture, view)[None], view)[0]
    expected = whole(picture)
    if mode == "center" and shape == (30, 200):
        # The ends of a strip are cut before it is resized, which may shift it by half a pixel.
        assert (shown - expected).abs().mean() < 0.02
    else:
        torch.testing.assert_close(shown, expected, rtol=0, atol=1e-5)


def test_the_paper_s_way_is_still_to_be_had(photo):
    model = pumalib.frozen("test_vit", "random", resize="both")
    size = model.run.data.image_size
    side = round(256 * size / 224)
    squashed = photo.resize((side, side), Image.Resampling.BICUBIC)
    edge = round((side - size) / 2)
    cropped = squashed.crop((edge, edge, edge + size, edge + size))
    expected = torch.from_numpy(np.array(cropped)).permute(2, 0, 1)
    assert torch.equal(pixels(photo, model.view), expected)
    with pytest.raises(ValueError, match="resize = 'timms'"):
        pumalib.frozen("test_vit", "random", resize="timms")


def test_a_card_says_how_images_are_resized():
    model = pumalib.frozen("test_vit", "random", 64)
    said = export.preprocessing(model.view)
    share = model.view.crop_share
    assert said["resize"] == math.floor(64 / share) and said["centre_crop"] == 64
    assert said["interpolation"].startswith(model.view.interpolation)


def test_models_of_the_project_are_shown_images_as_ever():
    model = embedder.frozen("mini_vit", "embedded")
    assert (model.run.data.image_size, model.run.data.resize) == (48, "both")
