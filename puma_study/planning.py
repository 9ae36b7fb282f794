"""What the rows of a table would train, what that needs, and how long it takes."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import pandas as pd

from pumalib import losses, models, training
from pumalib.config import Data, Profile, Run
from pumalib.data import expected, load, unchanged
from pumalib.training import run_folder

from . import needs, store
from .rows import Ensemble, asked
from .runs import list_runs

# Methods that train nothing.
UNTRAINED = ("pretrained", "whitened")
COLUMNS = ["method", "images", "kept", "hours", "measured", "memory", "data", "weights"]


def plan(
    rows: Mapping[str, Run | Ensemble],
    profile: Profile,
    side: Collection[str] = (),
    images_per_second: float = needs.STATED_SPEED,
) -> pd.DataFrame:
    """What `run_all` would train, what that needs and how long it would take; trains nothing.

    By run: `method`, `images` (x epochs), `kept`, `hours`, `memory` (of a GPU, in GB, NaN where
    unknown, see `needs`), and `data` and `weights`: what of them is missing on this machine, with
    the remedy; an empty text where nothing is.  `measured` says whether the hours are those of kept
    runs alike (their median speed); else they are by `images_per_second`, of a ViT-S at 224 px, and
    another backbone or size takes longer as it has more operations.  A run that failed counts as
    kept: it is not trained again.  Images of a benchmark whose counts are known, as "paper", need
    not be there.
    """
    done = store.read(profile.name).keys() | store.failures(profile.name).keys()
    speeds = _speeds(profile)
    lines = {}
    with unchanged():
        runs = [run for wanted in asked(rows, profile, side) for run in wanted.runs]
        found = [_found(run) for run in runs]
    for run, own in zip(runs, found, strict=True):
        alike = (run.method.name, run.backbone, run.data.image_size)
        is_measured = alike in speeds
        hours = 0.0
        memory = 0.0
        if own.images:
            speed = images_per_second / needs.relative_cost(run)
            if is_measured:
                speed = speeds[alike]
            hours = own.images / speed / 3600
            memory = needs.memory(run) / 1e9
        lines[own.name] = [
            run.method.name,
            own.images,
            own.name in done,
            hours,
            is_measured,
            memory,
            own.data,
            own.weights,
        ]
    return pd.DataFrame.from_dict(lines, "index", columns=COLUMNS).rename_axis("name")


def _speeds(profile: Profile) -> pd.Series:
    """Images per second of kept runs on such a device, by method, backbone and image size."""
    known = list_runs()
    device = training.device_name(training.choose_device(profile.training.device))
    known = known[known["device"] == device]
    alike = known.groupby(["method", "backbone", "data.image_size"])
    return alike["images_per_second"].median().dropna()


class _Found(NamedTuple):
    """What is known of a run before it is trained."""

    name: str
    images: int  # that it would see in training
    data: str  # what is missing of it on this machine, with the remedy; nothing: an empty text
    weights: str


def _found(run: Run) -> _Found:
    """The name of a run, how many images it would see in training, and what is missing for it.

    Raises ValueError or OSError where images are missing whose number is not known without them.
    """
    missing_data = ""
    try:
        images = len(load(run.data, run.seed).train)
    except (ValueError, OSError) as error:
        known = _expected_images(run.data)
        if known is None:
            raise
        images = known
        missing_data = str(error)
    missing_weights = models.backbones.missing_weights(run.backbone, run.pretrained)

    try:
        # A notebook makes texts before it trains.
        if missing_data or losses.texts.is_missing(run.loss_settings.get("texts", "")):
            raise FileNotFoundError
        name = run_folder.run_name(run)
    except OSError:
        # What is named by contents that are not there is not kept.
        name = run_folder.name_by_digests(run, "unknown", "unknown")
    if run.method.name in UNTRAINED:
        images = 0
    return _Found(name, images * run.training.epochs, missing_data, missing_weights)


def _expected_images(settings: Data) -> int | None:
    """Training images as they are known without files, as Table 1's are; else None."""
    known = expected(settings)
    if known is None:
        return None
    of_train = known[known["split"] == "train"]
    images = of_train["images"]
    if settings.shots:
        images = images.clip(upper=settings.shots * of_train["classes"])
    return int(images.sum())
