"""Where files that can be fetched again are kept: the user's cache directory.

Every part that caches something asks here, so that one variable moves it all. Only paths: nothing
is made or read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The directory for everything that Caravan caches; it need not exist.

    `CARAVAN_CACHE` if set, else the platform's place: `$XDG_CACHE_HOME/caravan` or
    `~/.cache/caravan`, `~/Library/Caches/caravan` on macOS, `%LOCALAPPDATA%\\caravan` on Windows.
    """
    own = os.environ.get("CARAVAN_CACHE")
    if own:
        return Path(own).expanduser()
    return _platform_cache() / "caravan"


def models_dir() -> Path:
    """The directory of the sample models inside the cache."""
    return cache_dir() / "models"


def digests_dir() -> Path:
    """The directory of what is known about the content of model files: see `ledger`."""
    return cache_dir() / "digests"


def weights_dir() -> Path:
    """The directory of the weights that workers keep, unless they are told another one."""
    return cache_dir() / "weights"


def profiles_dir() -> Path:
    """The directory of what was measured of devices: see `plan.store`."""
    return cache_dir() / "profiles"


def _platform_cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path is to be ignored.
    if xdg and os.path.isabs(xdg):
        return Path(xdg)
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches"
    local = os.environ.get("LOCALAPPDATA")
    if sys.platform == "win32" and local:
        return Path(local)
    return _home() / ".cache"


def _home() -> Path:
    # `Path.home()` raises for a user without a home (some containers); a relative path
    # would be worse.
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else Path(os.sep)
