"""A trained model as a file and in use: saved, loaded, refused, and given what people have."""

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from pumalib import config, embedder, models
from pumalib.models import backbones

RUN = config.Run(data=config.Data(image_size=48), method=config.METHODS["puma"], dim=16, pretrained="random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    models.save(models.build("puma", "mini_vit", 16, pretrained="random"), RUN, folder)
    return folder


@pytest.fixture(scope="module")
def embed(folder):
    return embedder.load(folder).embed


@pytest.fixture(scope="module")
def photo():
    """A smooth RGB image (40 px high, 50 wide)."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((50, 40), Image.Resampling.BICUBIC)


def test_saved_and_loaded_is_the_same_model(folder, embed):
    torch.manual_seed(0)
    model = models.build("puma", "mini_vit", 16, pretrained="random").eval()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 * 2 - 1  # mean and standard deviation 0.5
    np.testing.assert_allclose(embed(pixels), model(x).detach().numpy(), atol=1e-5)


def test_a_saved_model_holds_what_was_trained_alone_and_refuses_another_backbone(tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        torch.manual_seed(seed)
        safetensors.torch.save_file(backbones.mini_vit().state_dict(), tmp_path / f"{name}.safetensors")
    run = config.Run(data=config.Data(image_size=48), dim=16, pretrained=str(tmp_path / "one.safetensors"))
    model = models.build("puma", "mini_vit", 16, pretrained=run.pretrained)
    models.save(model, run, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * models.count_parameters(model)[0] + 10_000
    x = torch.randn(3, 3, 48, 48)
    assert torch.equal(embedder.load(tmp_path).model(x), model.eval()(x))
    with pytest.raises(ValueError, match="adapts another backbone than 'mini_vit'"):
        embedder.load(tmp_path, pretrained=tmp_path / "two.safetensors")
    with pytest.raises(FileNotFoundError, match="no model.safetensors in"):
        embedder.load(tmp_path / "nowhere")


def test_foreign_files_are_refused_by_name(folder, tmp_path):
    file, other = tmp_path / "model.safetensors", {"a": torch.ones(2)}
    with safetensors.safe_open(folder / file.name, "pt") as opened:
        metadata = opened.metadata()
    digest = backbones.state_digest(other, *(metadata[key] for key in ("run", "backbone_digest", "normalise")))
    whole = metadata | {"digest": digest}
    for metadata, message in ((None, "is damaged.*KeyError.'run'"), (whole, "is damaged: its tensors are not those")):
        file.write_bytes(safetensors.torch.save(other, metadata))
        with pytest.raises(ValueError, match=f"{file} {message}"):
            embedder.load(tmp_path)


def test_one_image_many_images_and_a_mixture(embed, photo, tmp_path):
    file, array = tmp_path / "image.png", np.asarray(photo)
    photo.save(file)
    expected = embed([file])
    assert expected.shape == (1, 16) and expected.dtype == np.float32
    for images in (file, str(file), photo, array, array[None], (p for p in [file]), array[:, ::-1][:, ::-1]):
        np.testing.assert_allclose(embed(images), expected, atol=1e-6)
    mixture = [file, photo, array, str(file), photo.convert("RGBA")]
    np.testing.assert_allclose(embed(mixture, batch_size=2), np.repeat(expected, 5, 0), atol=1e-6)
    assert embed([]).shape == embed(iter(())).shape == (0, 16)


def test_a_generator_is_read_batch_by_batch(folder, photo):
    loaded, taken, seen = embedder.load(folder), [], []
    loaded.model.register_forward_pre_hook(lambda module, args: seen.append(len(taken)))
    loaded.embed((taken.append(i) or photo for i in range(5)), batch_size=2)
    assert seen == [2, 4, 5]


GOOD, BAD = np.zeros((9, 9, 3), np.uint8), np.zeros((9, 9, 3))
REFUSED = {
    "image 1 is float64": [GOOD, BAD],
    "image 0 is float32": np.full((2, 9, 9, 3), np.nan, np.float32),
    r"image 0 is uint8 \(9, 9\);": GOOD[..., 0],
    r"image 0 is uint8 \(0, 9, 3\);": GOOD[:0],
    "image 1 is NoneType": [GOOD, None],
    "image 0 is int": 5,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_image_is_refused_by_position(embed, message):
    expected = r".*expected a file path, a PIL image or an array uint8 \(H, W, 3\)"
    with pytest.raises(ValueError, match=message + expected):
        embed(REFUSED[message])


def test_other_refusals(embed, photo, tmp_path):
    for size in (0, 2.5, "8"):
        with pytest.raises(ValueError, match=f"batch_size = {size!r}; it must be a whole number of at least 1"):
            embed(photo, size)
    (tmp_path / "no.jpg").write_bytes(b"no image")
    for name in ("no.jpg", "missing.jpg"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read as an image"):
            embed([photo, tmp_path / name])
    with pytest.raises(ValueError, match="float32 up to 1.0 has no agreed range"):
        embed(Image.fromarray(np.ones((9, 9), np.float32)))
