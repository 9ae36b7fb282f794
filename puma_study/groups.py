"""Groups of similar classes: the makes of cars, the alphabets of characters, the kinds of birds.

Because classes of one group are similar, intervals from a bootstrap over classes may be too narrow.
A bootstrap over groups, each drawn with all its classes, gives a second interval next to these.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from pumalib import data, paths
from pumalib.config import Data
from pumalib.evaluation import metrics

from . import store
from .record import FinishedRun


def _read_patterns() -> dict[str, str]:
    """By dataset, a pattern of class names whose first group is the group; {} out of a checkout."""
    if not paths.IN_CHECKOUT:
        return {}
    file = paths.ROOT / "data" / "photos" / "groups.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


PATTERNS = _read_patterns()


def group_of(dataset: str, class_name: str) -> str:
    """The group of a class; in a dataset without groups, the class itself.

    Raises ValueError if the class name does not match its pattern in data/photos/groups.yaml.
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
    """Group numbers of the queries of a kept run, by dataset, aligned with `store.classes`.

    Class names come from the run's benchmark, which must be on this machine.  Raises ValueError if
    its queries are not the kept ones, and the errors of `data.load`.
    """
    record = store.record(name, profile)
    queries = _queries(_settings(record, profile))
    found = {}
    first = 0
    for dataset, classes in record.classes().items():
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


def _settings(record: FinishedRun, profile: str | Path) -> Data:
    """The data settings of a run; for an ensemble, with the datasets of all its members."""
    if record.members is None:
        return record.settings.data
    settings = [store.record(member, profile).settings.data for member in record.members]
    datasets = [one.datasets[0] for one in settings if one.datasets is not None]
    return replace(settings[0], datasets=tuple(datasets))


def _queries(settings: Data) -> pd.DataFrame:
    """`dataset`, `class` and `group` of each scored test query, in the order of the kept hits."""
    images = data.load(settings).test.reset_index(drop=True)
    classes = images.groupby(["dataset", "label"], sort=False).ngroup().to_numpy()
    split = images["split"].to_numpy()
    counts = (split != "gallery") & (metrics.relevant_count(classes, split) > 0)
    names = zip(images["dataset"], images["class_name"], strict=True)
    groups = [group_of(dataset, class_name) for dataset, class_name in names]
    table = images[["dataset"]].assign(**{"class": classes, "group": groups})
    return table[counts].sort_values("class", kind="stable")
