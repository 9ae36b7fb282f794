"""Universal metric learning with parameter-efficient transfer learning (PUMA), as a study.
Read `models/puma.py` for the idea, `training/loop.py` for a run, `study/run_all.py` for a table."""

import os
import sys

if not sys.stderr.isatty() and "ipykernel" not in sys.modules:  # bars in a file, also those of kernels started here
    os.environ.setdefault("TQDM_MININTERVAL", "30")
__version__ = "0.1.0"
