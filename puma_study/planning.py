"""Which runs the rows of a table would train, with the data, memory and hours that they need."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import pandas as pd

from pumalib import losses, models, training
from pumalib.config import Profile, Run
from pumalib.data import load, unchanged
from pumalib.training import run_folder

from . import needs, store
from .rows import Ensemble, expected_images, seeded_rows
from .runs import list_runs

# The benchmark whose images come decoded.
EMBEDDED = "mini"
# Methods that train nothing.
UNTRAINED = ("pretrained", "whitened")
COLUMNS = [
    "method",
    "images",
    "kept",
    "hours",
    "measured",
    "memory",
    "disk",
    "files",
    "data",
    "weights",
]


def plan(
    rows: Mapping[str, Run | Ensemble],
    profile: Profile,
    side: Collection[str] = (),
    images_per_second: float = needs.STATED_SPEED,
) -> pd.DataFrame:
    """A row per run that `run_all` would use, with its training's needs; trains nothing.

    Indexed by the run's name, with the columns

    - `method`; `images` seen in training: images of the dataset times epochs;
    - `kept`: it is not trained, because it is kept or has failed before;
    - `hours`, from the median speed of similar kept runs if `measured` (same method, backbone,
      image size and device), else from `images_per_second` of a ViT-S at 224 px, scaled by the
      operations of the run's backbone and image size;
    - `memory` of a GPU in GB, NaN where unknown (see `needs`);
    - `disk` in GB, for the model that is kept;
    - `files`: whether its images are decoded from files;
    - `data`, `weights`: what is missing on this machine, with the remedy, or "".

    Images of a benchmark whose counts are known, such as "paper", need not be there.
    """
    done = store.read(profile.name).keys() | store.failures(profile.name).keys()
    speeds = _speeds(profile)
    lines = {}
    with unchanged():
        runs = [run for one in seeded_rows(rows, profile, side) for run in one.runs]
        found = [_found(run) for run in runs]
    for run, own in zip(runs, found, strict=True):
        alike = (run.method.name, run.backbone, run.data.image_size)
        is_measured = alike in speeds
        hours = 0.0
        memory = 0.0
        disk = 0.0
        if own.images:
            speed = images_per_second / needs.relative_cost(run)
            if is_measured:
                speed = speeds[alike]
            hours = own.images / speed / 3600
            memory = needs.memory(run) / 1e9
            disk = needs.disk(run) / 1e9
        lines[own.name] = [
            run.method.name,
            own.images,
            own.name in done,
            hours,
            is_measured,
            memory,
            disk,
            run.data.benchmark != EMBEDDED,
            own.data,
            own.weights,
        ]
    return pd.DataFrame.from_dict(lines, "index", columns=COLUMNS).rename_axis("name")


def _speeds(profile: Profile) -> pd.Series:
    """Median images per second of kept runs on this device, by method, backbone, image size."""
    known = list_runs()
    device = training.device_name(training.choose_device(profile.training.device))
    known = known[known["device"] == device]
    alike = known.groupby(["method", "backbone", "data.image_size"])
    return alike["images_per_second"].median().dropna()


class _Found(NamedTuple):
    """A run's name, the size of its training, and data and weights missing on this machine."""

    name: str
    images: int  # seen in training: images of the dataset times epochs
    data: str  # missing data and the remedy, or ""; likewise weights
    weights: str


def _found(run: Run) -> _Found:
    """Name, images and missing files of a run; its number of images need not come from files.

    Raises ValueError or OSError if images are missing and their number is not known.
    """
    missing_data = ""
    try:
        images = len(load(run.data, run.seed).train)
    except (ValueError, OSError) as error:
        known = expected_images(run.data)
        if known is None:
            raise
        images = known
        missing_data = str(error)
    missing_weights = models.backbones.missing_weights(run.backbone, run.pretrained)

    try:
        # Missing texts are no obstacle: a notebook makes them before it trains.
        if missing_data or losses.texts.is_missing(run.loss_settings.get("texts", "")):
            raise FileNotFoundError
        name = run_folder.run_name(run)
    except OSError:
        # A run's name depends on the contents of these files: without them it cannot be kept.
        name = run_folder.name_by_digests(run, "unknown", "unknown")
    if run.method.name in UNTRAINED:
        images = 0
    return _Found(name, images * run.training.epochs, missing_data, missing_weights)
