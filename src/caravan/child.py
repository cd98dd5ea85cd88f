"""`environment`: that of Python processes which this one starts with `-m`.

Such a process looks for its modules in the directory that it is started in, first of all, where
there may be anything: models that somebody else has put together, say.
"""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

# Of Python 3.11 and later; before, nothing but another way to start keeps it from looking there.
_SAFE_PATH = "PYTHONSAFEPATH"
# Where this package lies, as a process that is run from its own source directory finds it.
_HERE = Path(__file__).resolve().parent.parent


def environment(without: Container[str] = ()) -> dict[str, str]:
    """This process's own, less the variables `without`, and with modules looked for nowhere but
    where they are installed."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    try:
        beside = Path.cwd() == _HERE
    except OSError:
        beside = False
    return inherited if beside else {**inherited, _SAFE_PATH: "1"}
