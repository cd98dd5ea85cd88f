"""Model files on this machine: known samples, the user's cache, fetching, finding, describing.

Called by the command line and by anyone who has a model's name rather than a file. A floor just
above the errors: it knows nothing of the engine, and imports little more than the standard library.
"""

from __future__ import annotations

from caravan.models.cache import cache_dir, models_dir
from caravan.models.catalog import SAMPLES, WheelFile
from caravan.models.resolve import resolve
from caravan.models.splits import parts

__all__ = ["SAMPLES", "WheelFile", "cache_dir", "models_dir", "parts", "resolve"]
