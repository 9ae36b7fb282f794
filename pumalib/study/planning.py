"""What the rows of a table would train, and how long that takes."""

from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd

from .. import losses, training
from ..config import Data, Profile, Run
from ..data import expected, load, unchanged
from ..training import run_folder
from . import store
from .run_all import Ensemble, asked
from .runs import list_runs


def plan(
    rows: Mapping[str, Run | Ensemble], profile: Profile, side: Collection[str] = ()
) -> pd.DataFrame:
    """What `run_all` would train, and how long it would take; trains nothing.

    By run: `method`, `images` (x epochs), `kept` and `hours`, by the median speed of kept runs
    alike, else NaN.  One that failed counts as kept: it is not trained again.  Images of a
    benchmark whose counts are known, as "paper", need not be there.
    """
    done = store.read(profile.name).keys() | store.failures(profile.name).keys()
    speeds = _speeds(profile)
    lines = {}
    with unchanged():
        runs = [run for wanted in asked(rows, profile, side) for run in wanted.runs]
        sizes = [_name_and_images(run) for run in runs]
    for run, (name, images) in zip(runs, sizes, strict=True):
        hours = 0.0
        if images:
            alike = (run.method.name, run.backbone, run.data.image_size)
            hours = images / speeds.get(alike, np.nan) / 3600
        lines[name] = [run.method.name, images, name in done, hours]
    columns = ["method", "images", "kept", "hours"]
    return pd.DataFrame.from_dict(lines, "index", columns=columns).rename_axis("name")


def _speeds(profile: Profile) -> pd.Series:
    """Images per second of kept runs on such a device, by method, backbone and image size."""
    known = list_runs()
    device = training.device_name(training.choose_device(profile.training.device))
    known = known[known["device"] == device]
    alike = known.groupby(["method", "backbone", "data.image_size"])
    return alike["images_per_second"].median()


def _name_and_images(run: Run) -> tuple[str, int]:
    """The name of a run, and how many images it would see in training."""
    try:
        images = len(load(run.data, run.seed).train)
        if losses.texts.is_missing(run.loss_settings.get("texts", "")):
            # A notebook makes them before it trains; what is named by them is not kept.
            name = run_folder.name_by_digests(run, "unknown", "unknown")
        else:
            name = run_folder.run_name(run)
    except (ValueError, OSError):  # data or weights are not on this machine yet
        known = _expected_images(run.data)
        if known is None:
            raise
        name = run_folder.name_by_digests(run, "unknown", "unknown")
        images = known
    if run.method.name in ("pretrained", "whitened"):  # they train nothing
        return name, 0
    return name, images * run.training.epochs


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
