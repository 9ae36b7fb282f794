"""The command line, a thin face over the modules: `python -m pumalib run|runs|train|data|bench|parameters ...`."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings

from . import counts, data, paths
from .data import fetch, packing


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 if all went well."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in MODULES:
        try:
            return importlib.import_module(f".{MODULES[argv[0]][0]}", __package__).main(argv[1:])
        except (ValueError, OSError) as error:  # both name the file or field and the remedy
            print(f"error: {error}", file=sys.stderr)
            return 1
    if argv[:1] == ["bench"] and argv[1:2] and argv[1] in BENCHES:  # each bench reads its own options
        importlib.import_module(f".bench_{argv[1]}", __package__).main(argv[2:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m pumalib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, what) in MODULES.items():
        commands.add_parser(name, help=what)
    bench = commands.add_parser("bench", help="measure speed against references, side by side in one process")
    bench.add_argument("what", choices=BENCHES)
    commands.add_parser("parameters", help="count the parameters of every row of the paper: results/parameters.csv")
    arguments = commands.add_parser("data", help="the paper's eight datasets: status, download, prepare, verify")
    arguments.add_argument("action", choices=list(ACTIONS), help="; ".join(f"{k}: {v.__doc__}" for k, v in ACTIONS.items()))
    arguments.add_argument("datasets", nargs="*", help="names; none: all")
    arguments.add_argument("--root", default="data/raw", help="folder of the datasets (default: %(default)s)")
    arguments.add_argument("--benchmark", default="paper", choices=["paper", "folders"], help="for prepare and verify")
    arguments.add_argument("--mirror", help="download: address under which the archives lie by their own names")
    arguments.add_argument("--folder", help="prepare: where the copies go (default: .packed under the root)")
    arguments.add_argument("--side", type=int, default=512, help="prepare: shorter side at most, pixels")
    arguments.add_argument("--quality", type=int, default=90, help="prepare: of the JPEGs, 1 to 95")
    arguments.add_argument("--workers", type=int, default=2, help="prepare: processes")
    chosen = parser.parse_args(argv)
    try:
        if chosen.command == "parameters":
            print(counts.write())
            return 0
        return ACTIONS[chosen.action](chosen)
    except (ValueError, OSError) as error:  # both name the file or field and the remedy
        print(f"error: {error}", file=sys.stderr)
        return 1


def _status(chosen) -> int:
    """what is where, and what is missing"""
    print(fetch.status(paths.resolve(chosen.root)).to_string())
    return 0


def _download(chosen) -> int:
    """fetch and unpack what may be fetched freely, and say how to get the rest"""
    root = paths.resolve(chosen.root)
    by_hand = fetch.download(root, chosen.datasets or None, chosen.mirror)
    for name in by_hand:
        print(f"\n{fetch.instructions(root, name)}", file=sys.stderr)
    return 1 if by_hand else 0


def _prepare(chosen) -> int:
    """make packed copies, so that decoding does not hold up a GPU"""
    folder = paths.resolve(chosen.folder) if chosen.folder else None
    for file in packing.prepare(_present(chosen), folder, chosen.side, chosen.quality, chosen.workers):
        print(file)
    return 0


def _verify(chosen) -> int:
    """decode every image and name the bad ones"""
    bad = fetch.verify(_present(chosen))
    print(bad.to_string() if len(bad) else "every image can be decoded")
    return 1 if len(bad) else 0


def _present(chosen) -> data.Benchmark:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        return data.load(chosen.benchmark, paths.resolve(chosen.root), chosen.datasets or None, strict=False)


MODULES = {  # commands that read their own options: the module with their main(argv)
    "run": ("runner", "execute notebooks, several or all, here or on a cluster"),
    "runs": ("runs", "list, filter, compare, verify and remove finished runs"),
    "train": ("distributed", "train one run, on several GPUs under torchrun"),
}
BENCHES = ("losses", "train", "data")
ACTIONS = {"status": _status, "download": _download, "prepare": _prepare, "verify": _verify}

if __name__ == "__main__":
    sys.exit(main())
