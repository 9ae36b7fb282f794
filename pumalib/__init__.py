"""Universal metric learning with parameter-efficient transfer learning (PUMA), as a study.

Read `models/puma.py` for the idea, `study.py` for how a table is made, the notebooks for the results.
"""

__version__ = "0.1.0"
