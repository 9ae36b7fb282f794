"""Export a trained model: as ONNX, and as a folder with a model card and a configuration.

Users call `Embedder.to_onnx` and `Embedder.save`.
"""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import paths
from .config import Run
from .data.images import View, normalise
from .models import EmbeddingModel, count_parameters

# The largest allowed difference of an embedding's number between torch and onnxruntime.
TOLERANCE = 1e-4
# Random images that the comparison uses.
COMPARED = 5


def preprocessing(view: View) -> dict[str, Any]:
    """The steps that turn an image into the network's input, in order, as a plain dict."""
    size = view.settings.image_size
    return {
        "colours": "RGB, on white where transparent",
        "exif_orientation": "applied" if view.upright else "ignored",
        **_resizing(view),
        "centre_crop": size,
        "mean": list(view.mean),
        "std": list(view.std),
    }


def _resizing(view: View) -> dict[str, Any]:
    """The size after resizing (one number: of the shorter side), and the interpolation."""
    size = view.settings.image_size
    if view.settings.resize != "timm":
        side = round(256 * size / 224)
        both = view.settings.resize == "both"
        interpolation = "bicubic, antialiased (Pillow)"
        return {"resize": [side, side] if both else side, "interpolation": interpolation}

    # As timm.data.transforms_factory rounds.
    side = math.floor(size / view.crop_share)
    resize: Any = side
    if view.crop_mode == "squash":
        resize = [side, side]
    elif view.crop_mode == "border":
        resize = f"the longer side to {side}, then padded with the mean"
    return {"resize": resize, "interpolation": f"{view.interpolation}, antialiased (Pillow)"}


# ---- ONNX


class _FromPixels(nn.Module):
    """Normalisation, then the network: uint8 (B, 3, size, size) to (B, dim)."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: EmbeddingModel, view: View):
        super().__init__()
        self.model = model
        self.register_buffer("mean", _of_channels(view.mean))
        self.register_buffer("std", _of_channels(view.std))

    def forward(self, pixels: Tensor) -> Tensor:
        images = (pixels.float() - self.mean) / self.std
        return self.model(images)


def _of_channels(values: Any) -> Tensor:
    return 255 * torch.tensor(list(values), dtype=torch.float32)[:, None, None]


def write_onnx(model: EmbeddingModel, view: View, file: Path) -> float:
    """Write the network as ONNX, compare it with torch, and return the largest difference.

    Its input `pixels` is uint8 (B, 3, size, size), RGB; it normalises them itself.  Its output
    `embeddings` is (B, dim) float32.  The earlier steps are in its metadata, JSON `preprocessing`.
    Raises ImportError without `pip install 'pumalib[onnx]'`, RuntimeError if the two differ by more
    than 1e-4 (no file is written then), OSError where it cannot be written.
    """
    onnx, onnxruntime = _onnx_packages()
    # A copy, so that the caller's model stays on its device.
    network = _FromPixels(copy.deepcopy(model), view).cpu().eval()
    rng = np.random.default_rng(0)
    size = view.settings.image_size
    pixels = rng.integers(0, 256, (COMPARED, 3, size, size), dtype=np.uint8)
    program: Any = torch.onnx.export(
        network,
        (torch.from_numpy(pixels[:2]),),
        input_names=["pixels"],
        output_names=["embeddings"],
        dynamic_shapes={"pixels": {0: torch.export.Dim("images", min=1)}},
        dynamo=True,
        verbose=False,
    )
    made = program.model_proto
    entry = made.metadata_props.add()
    entry.key = "preprocessing"
    entry.value = json.dumps(preprocessing(view))
    onnx.checker.check_model(made)

    with paths.written_whole(file) as temporary:
        onnx.save(made, temporary)
        session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
        difference = 0.0
        for batch in (pixels, pixels[:1]):
            (found,) = session.run(["embeddings"], {"pixels": batch})
            expected = _by_torch(network.model, view, batch)
            difference = max(difference, float(np.abs(found - expected).max()))
        if difference > TOLERANCE:
            what = f"embeddings by onnxruntime differ from torch's by {difference:.1e}"
            raise RuntimeError(f"{what}, more than {TOLERANCE}: {file} is not written")
    return difference


def _by_torch(model: EmbeddingModel, view: View, pixels: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model(normalise(torch.from_numpy(pixels), view)).float().numpy()


def _onnx_packages() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError as error:
        remedy = "pip install 'pumalib[onnx]'"
        raise ImportError(f"ONNX needs the package {error.name!r}: {remedy}") from None
    return onnx, onnxruntime


# ---- a folder with a card and a configuration


def write_folder(  # noqa: PLR0917 - all that such a folder holds
    model: EmbeddingModel,
    run: Run,
    view: View,
    folder: Path,
    about: str,
    with_backbone: bool = True,
) -> None:
    """Write `config.json` and the card `README.md` beside a model's `model.safetensors`.

    `about` is the card's own text: data, licence, scores, intended use.
    """
    content = {"library_name": "pumalib", **_description(model, run, view)}
    if not with_backbone:
        content["backbone_included"] = False
    with paths.written_whole(folder / "config.json") as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with paths.written_whole(folder / "README.md") as file:
        file.write_text(_card(folder.name, content, about), encoding="utf-8")


def _description(model: EmbeddingModel, run: Run, view: View) -> dict[str, Any]:
    trained, total = count_parameters(model)
    # With a computed head, or without a head, there was no loss and no training step.
    steps = trained > 0
    datasets = None if run.data.datasets is None else list(run.data.datasets)
    return {
        "backbone": run.backbone,
        "pretrained": Path(run.pretrained).name,
        "method": run.method.name,
        "loss": run.loss if steps else None,
        "embedding_dim": model.dim,
        "l2_normalised": model.normalise,
        "parameters": {"trained": trained, "total": total},
        "trained_on": {"benchmark": run.data.benchmark, "datasets": datasets},
        "epochs": run.training.epochs if steps else 0,
        "seed": run.seed,
        "preprocessing": preprocessing(view),
    }


def _how_it_was_made(content: Mapping[str, Any]) -> str:
    if content["epochs"]:
        return f"trained with `{content['loss']}` for {content['epochs']} epochs"
    if content["method"] == "whitened":
        return "computed from the features of its training images in one pass, with no training"
    return "with nothing trained"


def _card(name: str, content: Mapping[str, Any], about: str) -> str:
    """The model card: YAML for hubs, a description, an example of use, and the text `about`."""
    parameters = content["parameters"]
    millions = f"{parameters['total'] / 1e6:.2f} M parameters"
    size = content["preprocessing"]["centre_crop"]
    unit = ", of length 1" if content["l2_normalised"] else ""
    arguments = '"<this folder>"'
    needs = ""
    if not content.get("backbone_included", True):
        arguments += ', pretrained="<its weights>.safetensors"'
        needs = " The backbone is not inside: without `pretrained` timm's hub is asked for it."
    lines = [
        "---",
        "library_name: pumalib",
        "pipeline_tag: image-feature-extraction",
        "tags: [metric-learning, image-retrieval]",
        "---",
        "",
        f"# {name}",
        "",
        f"An image of {size} px becomes {content['embedding_dim']} numbers{unit}: "
        f"`{content['method']}` on `{content['backbone']}`, {millions}, "
        f"{_how_it_was_made(content)}.",
        "",
        "```python",
        "import pumalib",
        "",
        f"model = pumalib.load({arguments})",
        'vectors = model.embed(["a.jpg", "b.jpg"])',
        "```",
        "",
        f"`config.json` has the settings and what happens to an image before the network.{needs}",
    ]
    if about:
        lines += ["", about.strip()]
    return "\n".join(lines) + "\n"
