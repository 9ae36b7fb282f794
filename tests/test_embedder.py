"""A trained model as a file and in use: saved, loaded, refused, and given what people have."""

import io
import re
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from pumalib import config, data, embedder, models, paths
from pumalib.data import images
from pumalib.data.images import ImageError
from pumalib.models import backbones

MINI = config.Data(image_size=48)
RUN = config.Run(data=MINI, method=config.METHODS["puma"], dim=16, pretrained="random")
PHOTOS = replace(RUN, data=config.Data(benchmark="folders", root="images", image_size=48))
NAMES = ("puma-curricularface-0123abcd", "linear-triplet-89abcdef")


def saved(folder, run=RUN, seed=0):
    """The folder, with the untrained model of a run."""
    torch.manual_seed(seed)
    model = models.build(run.method, run.backbone, run.dim, pretrained=run.pretrained)
    models.save(model, run, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def embed(folder):
    return embedder.load(folder).embed


@pytest.fixture(scope="module")
def photo_model(tmp_path_factory):
    """The same model, of a run on folders of photographs."""
    return embedder.load(saved(tmp_path_factory.mktemp("photos"), PHOTOS))


@pytest.fixture(scope="module")
def photo():
    """A smooth RGB image (40 px high, 50 wide)."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((50, 40), Image.Resampling.BICUBIC)


# ---- saved and loaded


def test_saved_and_loaded_is_the_same_model(embed):
    torch.manual_seed(0)
    model = models.build("puma", "mini_vit", 16, pretrained="random").eval()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    # Mean and standard deviation are 0.5.
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    np.testing.assert_allclose(embed(pixels), model(x).detach().numpy(), atol=1e-5)


def test_a_saved_model_holds_what_was_trained_alone_and_refuses_another_backbone(tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        torch.manual_seed(seed)
        weights = backbones.mini_vit().state_dict()
        safetensors.torch.save_file(weights, tmp_path / f"{name}.safetensors")
    run = config.Run(data=MINI, dim=16, pretrained=str(tmp_path / "one.safetensors"))
    model = models.build("puma", "mini_vit", 16, pretrained=run.pretrained)
    models.save(model, run, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 4 * models.count_parameters(model)[0] + 10_000
    x = torch.randn(3, 3, 48, 48)
    assert torch.equal(embedder.load(tmp_path).model(x), model.eval()(x))
    with pytest.raises(ValueError, match="adapts another backbone than 'mini_vit'"):
        embedder.load(tmp_path, pretrained=tmp_path / "two.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in"):
        embedder.load(tmp_path / "nowhere")


def test_a_relative_folder_is_one_of_the_project(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", folder.parent)
    # The current folder has one of this name too.
    (tmp_path / folder.name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert embedder.load(folder.name).run == RUN


KEYS = ("run", "backbone_digest", "normalise", "name")


def rewritten(file, change=None, state=None, keys=KEYS):
    """Write a model's file anew, with other tensors or words, and the digest of them all."""
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    if state is None:
        state = safetensors.torch.load_file(file)
    metadata = {key: metadata[key] for key in keys} | (change or {})
    metadata["digest"] = backbones.state_digest(state, *(metadata[key] for key in keys))
    file.write_bytes(safetensors.torch.save(state, metadata))


def test_foreign_files_are_refused_by_name(folder, tmp_path):
    file = tmp_path / "model.safetensors"
    other = {"a": torch.ones(2)}
    file.write_bytes(safetensors.torch.save(other, None))
    with pytest.raises(ValueError, match=f"{file} is damaged.*KeyError.'run'"):
        embedder.load(tmp_path)
    shutil.copy(folder / file.name, file)
    rewritten(file, state=other)
    with pytest.raises(ValueError, match=f"{file} is damaged: its tensors are not those"):
        embedder.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"run": "null"}, {"run": 10**5 * "["}, {"normalise": '{"a": 1}'}, {"normalise": 10**5 * "["}],
    ids=["no run", "a deep run", "another kind", "deep"],
)
def test_a_label_that_says_something_else_is_refused(change, tmp_path):
    file = saved(tmp_path / NAMES[0]) / "model.safetensors"
    rewritten(file, change=change)
    with pytest.raises(ValueError, match=f"{file} is damaged or not of pumalib"):
        embedder.load(file.parent)


def test_tensors_of_another_type_are_refused(tmp_path):
    file = saved(tmp_path / NAMES[0]) / "model.safetensors"
    state = safetensors.torch.load_file(file)
    rewritten(file, state=state | {"head.weight": state["head.weight"].to(torch.int8)})
    with pytest.raises(ValueError, match=f"{file} is damaged: its tensors are not those"):
        embedder.load(file.parent)


def test_the_model_of_another_run_is_refused(tmp_path):
    ours = saved(tmp_path / NAMES[0])
    theirs = saved(tmp_path / NAMES[1], seed=1)
    assert embedder.load(ours).run == RUN
    shutil.copy(theirs / "model.safetensors", ours)
    with pytest.raises(ValueError, match=f"is the model of '{NAMES[1]}', not of '{NAMES[0]}'"):
        embedder.load(ours)
    # A folder of another kind of name is nobody's: a copy of a run may be called as one likes.
    assert embedder.load(ours.rename(tmp_path / "my model")).run == RUN


def test_the_name_of_a_run_is_covered_by_the_digest(tmp_path):
    file = saved(tmp_path / NAMES[0]) / "model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    state = safetensors.torch.load_file(file)
    for other in ({**metadata, "name": NAMES[1]}, {**metadata, "name": ""}):
        file.write_bytes(safetensors.torch.save(state, other))
        with pytest.raises(ValueError, match="its contents have another digest"):
            embedder.load(file.parent)


def test_a_model_that_was_saved_without_its_name_still_loads(tmp_path, photo):
    expected = embedder.load(saved(tmp_path / "now")).embed(photo)
    file = saved(tmp_path / NAMES[0]) / "model.safetensors"
    rewritten(file, keys=KEYS[:3])
    assert np.array_equal(embedder.load(file.parent).embed(photo), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    file = saved(tmp_path) / "model.safetensors"
    state = safetensors.torch.load_file(file)
    state["head.weight"][3, 4] = value
    rewritten(file, state=state)
    with pytest.raises(ValueError, match=f"{file} .* the weights head.weight are not finite"):
        embedder.load(tmp_path)


# ---- given what people have


def encoded(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_bytes_and_open_files_are_images_as_their_files_are(embed, photo, tmp_path):
    file = tmp_path / "image.png"
    photo.save(file)
    expected = embed(file)
    content = file.read_bytes()
    with file.open("rb") as opened:
        given = [content, io.BytesIO(content), opened]
        for one in given:
            assert np.array_equal(embed(one), expected)
            if one is not content:
                one.seek(0)
        np.testing.assert_allclose(embed(given), np.repeat(expected, 3, 0), atol=1e-6)
    with pytest.raises(ImageError, match="^image 1: cannot be read as an image"):
        embed([content, b"no image"])
    (tmp_path / "no.png").write_bytes(b"no image")
    with (tmp_path / "no.png").open("rb") as opened, pytest.raises(ImageError, match=r"no\.png: "):
        embed(opened)


def test_workers_change_nothing_but_who_decodes(embed, photo):
    pictures = [photo.rotate(10 * number) for number in range(7)]
    expected = embed(pictures, batch_size=3)
    decoding = set()

    class Noted(io.BytesIO):
        def read(self, *arguments):
            decoding.add(threading.current_thread())
            return super().read(*arguments)

    given = (Noted(encoded(picture)) for picture in pictures)
    assert np.array_equal(embed(given, batch_size=3, workers=2), expected)
    assert 1 <= len(decoding) <= 2
    assert threading.main_thread() not in decoding
    assert embed([], workers=2).shape == (0, 16)
    with pytest.raises(ImageError, match="^image 4: "):
        embed([*map(encoded, pictures[:4]), b"x", b"y"], batch_size=2, workers=2)
    with pytest.raises(ValueError, match="workers = -1; it must be a whole number of at least 0"):
        embed(pictures, workers=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_left_out_and_listed(folder, photo, tmp_path, workers):
    loaded = embedder.load(folder)
    (tmp_path / "no.jpg").write_bytes(b"no image")
    given = [photo, tmp_path / "no.jpg", encoded(photo.rotate(90)), tmp_path / "missing.jpg"]
    found = loaded.embed_readable(given, batch_size=2, workers=workers)
    assert found.places.tolist() == [0, 2]
    assert found.unreadable[1].startswith("it has none of the formats JPEG, PNG, ")
    assert found.unreadable[3] == "there is no such file"
    assert set(found.unreadable) == {1, 3}
    expected = loaded.embed([photo, photo.rotate(90)])
    np.testing.assert_allclose(found.vectors, expected, atol=1e-6)

    none = loaded.embed_readable([b"", b"x", b"y"], batch_size=1, workers=workers)
    assert none.vectors.shape == (0, 16)
    assert none.places.tolist() == []
    assert len(none.unreadable) == 3
    with pytest.raises(ValueError, match="image 1 is int"):
        loaded.embed_readable([photo, 5], workers=workers)


def test_one_image_many_images_and_a_mixture(embed, photo, tmp_path):
    file = tmp_path / "image.png"
    array = np.asarray(photo)
    photo.save(file)
    expected = embed([file])
    assert expected.shape == (1, 16)
    assert expected.dtype == np.float32
    twice_mirrored = array[:, ::-1][:, ::-1]
    for given in (file, str(file), photo, array, array[None], (p for p in [file]), twice_mirrored):
        np.testing.assert_allclose(embed(given), expected, atol=1e-6)
    mixture = [file, photo, array, str(file), photo.convert("RGBA")]
    np.testing.assert_allclose(embed(mixture, batch_size=2), np.repeat(expected, 5, 0), atol=1e-6)
    assert embed([]).shape == embed(iter(())).shape == (0, 16)


def test_grey_and_transparent_arrays_and_tensors_are_images(embed, photo):
    """Each as the same picture from PIL, alone and in a batch."""
    rgb = np.asarray(photo)
    grey = np.asarray(photo.convert("L"))
    clear = np.dstack([rgb, np.full(grey.shape, 100, np.uint8)])
    for array in (rgb, grey, clear, grey[..., None]):
        expected = embed(Image.fromarray(array.squeeze()))
        tensor = torch.from_numpy(array.copy())
        if array.ndim == 3:
            tensor = tensor.permute(2, 0, 1)
        for one in (array, tensor):
            np.testing.assert_allclose(embed(one), expected, atol=1e-6)
            batch = one[None].repeat(5, 0) if one is array else one[None].repeat_interleave(5, 0)
            np.testing.assert_allclose(embed(batch), np.repeat(expected, 5, 0), atol=1e-6)


@pytest.mark.parametrize("kind", ["mini", "photos"])
def test_photographs_are_turned_whatever_the_run_was_tested_on(
    kind, folder, photo_model, photo, tmp_path
):
    loaded = embedder.load(folder) if kind == "mini" else photo_model
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees"
    photo.save(tmp_path / "turned.png", exif=exif)
    upright = photo.transpose(Image.Transpose.ROTATE_270)
    for given in (tmp_path / "turned.png", (tmp_path / "turned.png").read_bytes()):
        np.testing.assert_allclose(loaded.embed(given), loaded.embed(upright), atol=1e-6)


def test_an_error_recommends_what_helps_here(embed, tmp_path):
    (tmp_path / "no.jpg").write_bytes(b"no image")
    with pytest.raises(ImageError, match="leave such images out with embed_readable") as caught:
        embed(tmp_path / "no.jpg")
    assert "drop_unreadable" not in str(caught.value)


@pytest.mark.parametrize("kind", ["mini", "photos"])
def test_a_file_and_an_array_of_the_networks_size_are_embedded_alike(
    kind, embed, photo_model, photo, tmp_path
):
    given = embed if kind == "mini" else photo_model.embed
    small = photo.resize((48, 48))
    small.save(tmp_path / "small.png")
    found = given([tmp_path / "small.png", small, np.asarray(small)])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_what_is_shown_is_what_the_run_was_tested_on(folder, photo_model, photo, tmp_path):
    """Photographs of every size are resized and cropped; pictures of `mini` are not."""
    small = np.asarray(photo.resize((48, 48)))
    model = photo_model.model
    resized = images.pixels(Image.fromarray(small), photo_model.view)
    for loaded, shown in (
        (photo_model, resized),
        (embedder.load(folder), torch.tensor(small).permute(2, 0, 1)),
    ):
        network_input = images.normalise(shown[None], loaded.view)
        expected = model(network_input).detach().numpy()
        np.testing.assert_allclose(loaded.embed(small), expected, atol=1e-6)
        prepared = loaded.embed(network_input, prepared=True)
        np.testing.assert_allclose(prepared, expected, atol=1e-6)


def test_pictures_of_the_benchmark_are_embedded_as_in_it(folder):
    loaded = embedder.load(folder)
    benchmark = data.load(RUN.data)
    rows = benchmark.test.iloc[:70]
    expected = embedder.embed_rows(loaded.model, benchmark, rows, RUN.data)
    found = loaded.embed(benchmark.pixels[rows["path"]], batch_size=256)
    assert np.array_equal(found, expected)
    vectors, weights = embedder.embed_with_prompt_weights(loaded.model, benchmark, rows, RUN.data)
    assert np.array_equal(vectors, expected)
    assert weights.shape == (70, 20)


def test_a_generator_is_read_batch_by_batch(folder, photo):
    loaded = embedder.load(folder)
    taken = []
    seen = []

    def photos():
        for number in range(5):
            taken.append(number)
            yield photo

    loaded.model.register_forward_pre_hook(lambda module, args: seen.append(len(taken)))
    loaded.embed(photos(), batch_size=2)
    assert seen == [2, 4, 5]


def test_prepared_tensors_one_many_and_none(embed):
    x = torch.randn(3, 3, 48, 48)
    found = embed(x, prepared=True, batch_size=2)
    assert found.shape == (3, 16)
    np.testing.assert_allclose(embed(x[0], prepared=True), found[:1], atol=1e-6)
    np.testing.assert_allclose(embed(iter(x.double()), prepared=True), found, atol=1e-6)
    assert embed([], prepared=True).shape == (0, 16)


GOOD = np.zeros((9, 9, 3), np.uint8)
BAD = np.zeros((9, 9, 3))
REFUSED = {
    "image 1 is float64": [GOOD, BAD],
    "image 0 is float32": np.full((2, 9, 9, 3), np.nan, np.float32),
    r"image 0 is uint8 \(9, 9, 2\);": GOOD[..., :2],
    r"image 0 is uint8 \(0, 9, 3\);": GOOD[:0],
    # Not three or nine pictures of grey: the channels are where they should not be.
    r"image 0 is uint8 \(3, 9, 9\)": GOOD.transpose(2, 0, 1),
    r"image 0 is torch.uint8 \(9, 9, 3\)": torch.from_numpy(GOOD.copy()),
    "image 1 is NoneType": [GOOD, None],
    "image 0 is int": 5,
    r"image 0 is torch.float32 \(3, 48, 48\)": torch.zeros(2, 3, 48, 48),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_image_is_refused_by_position(embed, message):
    expected = r".*expected a file path, its bytes, an open file, a PIL image or an array uint8"
    with pytest.raises(ValueError, match=message + expected):
        embed(REFUSED[message])


NOT_PREPARED = {
    r"prepared image 0 is torch.float32 \(3, 9, 9\)": torch.zeros(3, 9, 9),
    r"prepared image 0 is torch.uint8 \(3, 48, 48\)": torch.zeros(1, 3, 48, 48, dtype=torch.uint8),
    r"prepared image 1 is uint8 \(9, 9, 3\)": [torch.zeros(3, 48, 48), GOOD],
}


@pytest.mark.parametrize("message", NOT_PREPARED)
def test_what_is_not_prepared_is_refused_by_position(embed, message):
    expected = r"; expected a normalised tensor of floats \(3, 48, 48\)"
    with pytest.raises(ValueError, match=message + expected):
        embed(NOT_PREPARED[message], prepared=True)


def test_other_refusals(embed, photo, tmp_path):
    for size in (0, 2.5, "8"):
        message = f"batch_size = {size!r}; it must be a whole number of at least 1"
        with pytest.raises(ValueError, match=message):
            embed(photo, size)
    (tmp_path / "no.jpg").write_bytes(b"no image")
    for name in ("no.jpg", "missing.jpg"):
        with pytest.raises(ValueError, match=re.escape(f"{name}: cannot be read as an image")):
            embed([photo, tmp_path / name])
    with pytest.raises(ValueError, match=r"float32 up to 1\.0 has no agreed range"):
        embed(Image.fromarray(np.ones((9, 9), np.float32)))
