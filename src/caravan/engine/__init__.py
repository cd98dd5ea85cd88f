"""ctypes over ggml and llama: library discovery, struct layouts, checks, thin calls."""

from caravan.engine.library import Engine, load
from caravan.engine.log import forget_errors, recent_errors, set_verbose

__all__ = ["Engine", "forget_errors", "load", "recent_errors", "set_verbose"]
