"""Settings of runs, the methods, and profiles read from YAML.

Read `run.py` first, then `methods.py` and `profiles.py`; `reading.py` has what they check by.
"""

from .methods import METHODS, Method, method, settings_of_method
from .profiles import Profile, overridable, profile, require_values
from .reading import CHECKED, Amount, Count, Rate, added, checked, read_yaml
from .run import BY_MEMORY, NOT_IN_FINGERPRINT, NUMBERS, Data, Run, Training, short_hash

__all__ = [
    "BY_MEMORY",
    "CHECKED",
    "METHODS",
    "NOT_IN_FINGERPRINT",
    "NUMBERS",
    "Amount",
    "Count",
    "Data",
    "Method",
    "Profile",
    "Rate",
    "Run",
    "Training",
    "added",
    "checked",
    "method",
    "overridable",
    "profile",
    "read_yaml",
    "require_values",
    "settings_of_method",
    "short_hash",
]
