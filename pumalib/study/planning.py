"""What the rows of a table would train, and how long that takes."""

from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd

from .. import training
from ..config import Profile, Run
from ..data import expected, load
from ..training import run_folder
from . import runs, store
from .run_all import Ensemble, asked


def plan(rows: Mapping[str, Run | Ensemble], profile: Profile, side: Collection[str] = ()) -> pd.DataFrame:
    """What `run_all` would train, and how long it would take; trains nothing and needs no data of "paper".
    By run: `method`, `images` (x epochs), `kept` and `hours`, by the median speed of kept runs alike, else NaN."""
    known, done, lines = runs.list_runs(), store.read(profile.name), {}
    known = known[known["device"] == training.device_name(training.choose_device(profile.training.device))]
    speeds = known.groupby(["method", "backbone", "data.image_size"])["images_per_second"].median()
    for run in (run for _, parts in asked(rows, profile, side) for run in parts):
        try:
            name, images = run_folder.run_name(run), len(load(run.data, run.seed).train)
        except (ValueError, OSError):  # not on this machine yet; then by the counts of Table 1
            if (known_counts := expected(run.data)) is None:
                raise
            of_train = known_counts["split"] == "train"
            counts = known_counts.loc[of_train, ["images", "classes"]].to_numpy().tolist()
            images = sum(min(count, (run.data.shots or count) * classes) for count, classes in counts)
            name = run_folder.name(run, "unknown", "unknown")
        images *= run.training.epochs * (run.method.name != "pretrained")
        speed = speeds.get((run.method.name, run.backbone, run.data.image_size), np.nan)
        lines[name] = [run.method.name, images, name in done, images / speed / 3600 if images else 0.0]
    return pd.DataFrame.from_dict(lines, "index", columns=["method", "images", "kept", "hours"]).rename_axis("name")
