"""Tests and notebooks under test write to a folder of their own.

No earlier result makes them pass that way.
"""

import os
import tempfile

# Workers of pytest-xdist inherit the folder: what one has trained is there for all.
os.environ.setdefault("PUMALIB_RESULTS", tempfile.mkdtemp(prefix="pumalib-test-results-"))

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if workers > 1:
    # Before torch is imported: more threads than cores would wait for each other.
    share = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))


def pytest_collection_modifyitems(items):
    """Notebooks are tested at `smoke`; as they stand they open with the kept numbers of `mini`."""
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and "parameters" in cell.metadata.get("tags", []):
            cell.source = cell.source.replace('profile = "mini"', 'profile = "smoke"')


def pytest_addoption(parser):
    parser.addoption(
        "--faults", type=int, default=200, help="faults that tests/test_faults.py draws"
    )
    parser.addoption("--seed", type=int, default=0, help="by which they are drawn")
    parser.addoption(
        "--families",
        action="store_true",
        help="in tests/test_backbones.py all of timm's families, not a selection",
    )
