"""Write the timings to results/bench/<part>-<device>.csv, a table for each part.

Full tables are reported; quick ones, with the smallest sizes, only show that the code runs.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pandas as pd
import torch

from pumalib import data, paths, training

from . import losses, reading, search, steps
from .clock import Clock, environment, peak_memory

PROXY_LOSSES = ["proxynca", "proxynca++", "proxyanchor", "cosface", "arcface", "curricularface"]
# By number of proxies per class.
LOSSES = {
    1: [losses.LossEntry(name, name, bar=1.6) for name in PROXY_LOSSES],
    10: [losses.LossEntry("softtriple", "softtriple", bar=2.0)],
    12: [losses.LossEntry("proxygml, weight 0", "proxygml", bar=3.0, settings={"weight": 0})],
}
METHODS = [
    "timm",
    "full",
    "linear",
    "vpt",
    "lora",
    "adaptformer",
    "adapter-stochastic",
    "prompt-pool",
    "puma",
]


def write(
    parts: Collection[str], *, full: bool, device: str = "auto", rounds: int | None = None
) -> Iterator[Path]:
    """Measure parts (none given: all) one after another, and yield the file of each.

    `rounds` is the number of counted turns per candidate, by default 7, or 1 for quick tables.
    These are written below `paths.RESULTS`, full ones into the checkout.  Raises ValueError for an
    unknown part.
    """
    data.check_known("part", parts, PARTS)
    where = training.choose_device(device)
    clock = Clock(where, rounds or (7 if full else 1))
    folder = (paths.ROOT / "results" if full else paths.RESULTS) / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts or PARTS:
        table = PARTS[part](full, clock).assign(**environment(where))
        file = folder / f"{part}-{where.type}.csv"
        with paths.written_whole(file) as temporary:
            table.to_csv(temporary, index=False, float_format="%.5g")
        yield file


def loss_table(full: bool, clock: Clock) -> pd.DataFrame:
    """Losses, forward and backward; if full, with the paper's batch and number of classes."""
    sizes = losses.LossSizes(batch=24, dim=8, classes=20)
    if full:
        sizes = losses.LossSizes(batch=720, dim=128, classes=15_952)
    tables = []
    for per_class, entries in LOSSES.items():
        tables.append(losses.losses_beside_cross_entropy(entries, per_class, sizes, clock))
    tables.append(losses.losses_beside_library(sizes, clock))
    return pd.concat(tables, ignore_index=True)


def training_table(full: bool, clock: Clock) -> pd.DataFrame:
    """Training steps; a full table from a GPU says for each of PUMA's bars whether it is met."""
    is_cuda = clock.device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    setting = steps.StepSetting("mini_vit", 48, dtype, clock.device)
    sizes = steps.TrainingSizes(batch=4, classes=20, matmul_side=64)
    if full:
        setting = steps.StepSetting("vit_small_patch16_224", 224, dtype, clock.device)
        sizes = steps.TrainingSizes(batch=16, classes=15_952, matmul_side=1024)
    if full and is_cuda:
        sizes = steps.TrainingSizes(batch=720, classes=15_952, matmul_side=8192)
    table = steps.training_times(METHODS, sizes, setting, clock)
    if not (full and is_cuda):
        return table

    puma = table.set_index("method").loc["puma"]
    bars = {
        "beside_full at least 1.15": puma["beside_full"] >= 1.15,
        "memory_beside_full at most 0.80": puma["memory_beside_full"] <= 0.80,
        "share at least 0.40": puma["share"] >= 0.40,
    }
    for bar, met in bars.items():
        table.loc[table["method"] == "puma", bar] = "met" if met else "not met"
    return table


def reading_table(full: bool, clock: Clock) -> pd.DataFrame:
    """Reading photographs into batches, on one CPU core for every device."""
    if full:
        return reading.reading_times(reading.PhotographSizes(240, narrowest=500, widest=1201), 30)
    return reading.reading_times(reading.PhotographSizes(8, narrowest=500, widest=1201), 4)


def decoder_table(full: bool, _clock: Clock) -> pd.DataFrame:
    """Decoding photographs of 500 px, on one CPU core for every device."""
    if full:
        return reading.decoding_times(reading.PhotographSizes(120, narrowest=500, widest=501), 30)
    return reading.decoding_times(reading.PhotographSizes(8, narrowest=500, widest=501), 4)


def small_file_table(full: bool, clock: Clock) -> pd.DataFrame:
    """Training steps on small files, against steps on images in memory."""
    if full:
        sizes = reading.PhotographSizes(450, narrowest=96, widest=129)
        return reading.small_file_times(sizes, 90, clock)
    sizes = reading.PhotographSizes(8, narrowest=96, widest=129)
    return reading.small_file_times(sizes, 4, clock, "test_vit")


def search_table(full: bool, clock: Clock) -> pd.DataFrame:
    """All metrics of a test set as large as SOP's, and if full of all eight together."""
    if not full:
        table = search.search_times({"sop": (600, 113)}, clock)
    else:
        few = Clock(clock.device, min(clock.rounds, 3))  # each takes a minute
        one = search.search_times({"sop": search.EIGHT_DATASETS["sop"]}, few)
        eight = search.search_of_eight(clock.device)
        table = pd.concat([one, eight], ignore_index=True)
    return table.assign(peak_memory_gb=peak_memory() / 1e9)


PARTS: dict[str, Callable[[bool, Clock], pd.DataFrame]] = {
    "losses": loss_table,
    "training": training_table,
    "data": reading_table,
    "decoders": decoder_table,
    "small": small_file_table,
    "search": search_table,
}
