"""Images like those of a reader of docs/own-images.md, and the page's blocks, run unchanged."""

import re
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pumalib.__main__ import main
from pumalib.models import backbones

PAGE = Path(__file__).parent.parent / "docs" / "own-images.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Other commands in sentences are bare names, and one needs real images.
IN_SENTENCE = re.compile(r"`(python -m pumalib [^`]*my-images.yaml[^`]*)`")
COMMAND = "python -m pumalib "


def blocks():
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def make_images(folder):
    """Write a reader's images: six classes of five images, a query and labels."""
    rng = np.random.default_rng(0)
    labels = ["path,label"]
    for name in ("cups", "hats", "keys", "mugs", "pens", "toys"):
        (folder / "photos" / name).mkdir(parents=True)
        base = rng.integers(0, 256, (4, 5, 3))
        for number in range(5):
            noise = np.clip(base + rng.integers(-9, 9, base.shape), 0, 255).astype(np.uint8)
            picture = Image.fromarray(noise).resize((60, 50), Image.Resampling.BICUBIC)
            picture.save(folder / "photos" / name / f"{number}.jpg")
            labels.append(f"{name}/{number}.jpg,{name}")
    shutil.copy(folder / "photos" / "cups" / "0.jpg", folder / "query.jpg")
    (folder / "labels.csv").write_text("\n".join(labels))


def hub_at_hand():
    """A substitute for timm's hub: random weights, the same in every call, of two layers."""
    from_timm = backbones._from_timm

    def from_hub(name, pretrained, image_size, pooling):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = from_timm(name, False, image_size, pooling)
        # The page's commands are tested, and train as they would; all twelve take minutes.
        model.blocks = model.blocks[:2]
        return model

    return from_hub


def run_commands(text):
    for line in text.splitlines():
        assert line.startswith(COMMAND), line
        assert main(line.removeprefix(COMMAND).split()) == 0, line


def write_file(text):
    name = re.match(r"# ([\w.-]+)\n", text)[1]
    with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123 - as an editor does
        file.write(text)


def run_block(kind, text, names):
    """Run a block unchanged: Python with the `names` of earlier blocks, a file, or commands."""
    if kind == "python":
        exec(compile(text, str(PAGE), "exec"), names)
    elif kind == "yaml":
        write_file(text)
    else:
        run_commands(text)


def run_all_commands():
    """Run every command of the page, also those in sentences, in the working directory."""
    backbones._from_timm = hub_at_hand()
    make_images(Path.cwd())
    for kind, text in blocks():
        # One block of Python writes the split that a command asks for.
        if kind != "python" or "split.csv" in text:
            run_block(kind, text, {})
    said = IN_SENTENCE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(said) >= 2
    for command in said:
        run_commands(command)
