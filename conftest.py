"""Tests and notebooks under test write to a folder of their own.

No earlier result makes them pass that way.
"""

import os
import tempfile

os.environ.setdefault("PUMALIB_RESULTS", tempfile.mkdtemp(prefix="pumalib-test-results-"))


def pytest_addoption(parser):
    parser.addoption(
        "--faults", type=int, default=200, help="faults that tests/test_faults.py draws"
    )
