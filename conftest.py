"""Tests and notebooks under test write to a folder of their own.

No earlier result makes them pass that way.
"""

import multiprocessing
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from queue import Empty

# Workers of pytest-xdist inherit the folder: what one has trained is there for all.
os.environ.setdefault("PUMALIB_RESULTS", tempfile.mkdtemp(prefix="pumalib-test-results-"))

sys.path.insert(0, str(Path(__file__).with_name("tests")))
import forks

# Processes of the tests are forks of one that has imported what they need, also Dask's workers.
multiprocessing.set_forkserver_preload(forks.IMPORTED)
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")

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


# Not on a machine for the GPU's tests alone.
if find_spec("nbval"):
    from jupyter_client.provisioning import local_provisioner
    from nbval import plugin
    from nbval.kernel import RunningKernel

    local_provisioner.launch_kernel = forks.Kernel

    class SharedKernel(RunningKernel):
        """One for all notebooks of a worker: to import torch takes longer than most of them."""

        running = None

        @classmethod
        def of_worker(cls, *args, **kwargs):
            """The worker's kernel, with no name of an earlier notebook; a new one if it died."""
            if cls.running is None or not cls.running.is_alive():
                cls.running = cls(*args, **kwargs)
            return cls.running

        def stop(self):
            """End a notebook: forget its names.  A kernel that does not answer is ended itself."""
            try:
                asked = self.execute_cell_input("%reset -f")
                self.await_reply(asked, timeout=60)
                self.await_idle(asked, timeout=60)
            except Empty:
                self.end()

        def end(self):
            super().stop()

    plugin.RunningKernel = SharedKernel.of_worker

    def pytest_sessionfinish():
        if SharedKernel.running is not None and SharedKernel.running.is_alive():
            SharedKernel.running.end()


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
