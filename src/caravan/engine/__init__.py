"""ctypes over ggml and llama: library discovery, struct layouts, checks, thin calls."""

from caravan.engine.library import Engine, adopt, load
from caravan.engine.log import forget_errors, recent_errors, set_verbose

__all__ = ["Engine", "adopt", "forget_errors", "load", "recent_errors", "set_verbose"]
