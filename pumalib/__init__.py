"""Universal metric learning with parameter-efficient transfer learning (PUMA), as a study.
Read `models/puma.py` for the idea, `training/loop.py` for a run, `study/run_all.py` for a table."""

__version__ = "0.1.0"
