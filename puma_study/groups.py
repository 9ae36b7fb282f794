"""Groups of classes: the makes of cars, the alphabets of characters, the kinds of birds.

Classes of one group are alike, so that a bootstrap over classes may call too much certain; one that
draws groups, each with all its classes, is shown beside it.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from pumalib import data, paths
from pumalib.config import Data, Run
from pumalib.evaluation import metrics

from . import store


def _read_patterns() -> dict[str, str]:
    """By dataset what of a class's name is its group; nothing without the study's checkout."""
    if not paths.IN_CHECKOUT:
        return {}
    file = paths.ROOT / "data" / "photos" / "groups.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


PATTERNS = _read_patterns()


def group_of(dataset: str, class_name: str) -> str:
    """The group of a class; of a dataset that has none the class itself.

    Raises ValueError where the name of a class is not as data/photos/groups.yaml says.
    """
    if dataset not in PATTERNS:
        return class_name
    found = re.fullmatch(PATTERNS[dataset], class_name)
    if found is None:
        raise ValueError(
            f"class {class_name!r} of {dataset} has no group by {PATTERNS[dataset]!r}: mend "
            "data/photos/groups.yaml"
        )
    return found[1]


def numbers(name: str, profile: str | Path) -> dict[str, np.ndarray]:
    """As `store.classes`, a number for the group of every query of a kept run.

    The names of classes are those of the run's benchmark, which must be on this machine.  Raises
    ValueError where it has other queries than were kept, and what `data.load` raises.
    """
    record = store.record(name, profile)
    queries = _queries(_settings(record, profile))
    kept = store.classes(name, profile)
    found = {}
    first = 0
    for dataset, classes in kept.items():
        if dataset == "unified":
            continue
        own = queries[queries["dataset"] == dataset]
        if not np.array_equal(own["class"].diff().ne(0).cumsum(), classes):
            raise ValueError(
                f"{dataset}: today's images have other queries than {profile}/{name} kept; train "
                "it again to group them"
            )
        codes, names = pd.factorize(own["group"])
        found[dataset] = first + codes
        first += len(names)
    found["unified"] = np.concatenate(list(found.values()))
    return found


def _settings(record: dict[str, Any], profile: str | Path) -> Data:
    """The data of a run, of an ensemble those of all its members."""
    if "members" not in record:
        return Run.from_dict(record["run"]).data
    members = [store.record(member, profile)["run"] for member in record["members"]]
    settings = [Run.from_dict(member).data for member in members]
    datasets = [one.datasets[0] for one in settings if one.datasets is not None]
    return replace(settings[0], datasets=tuple(datasets))


def _queries(settings: Data) -> pd.DataFrame:
    """`dataset`, `class` and `group` of each test query that counts, in the order of their hits."""
    images = data.load(settings).test.reset_index(drop=True)
    classes = images.groupby(["dataset", "label"], sort=False).ngroup().to_numpy()
    split = images["split"].to_numpy()
    counts = (split != "gallery") & (metrics.relevant_count(classes, split) > 0)
    names = zip(images["dataset"], images["class_name"], strict=True)
    groups = [group_of(dataset, class_name) for dataset, class_name in names]
    table = images[["dataset"]].assign(**{"class": classes, "group": groups})
    return table[counts].sort_values("class", kind="stable")
