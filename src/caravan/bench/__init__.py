"""`caravan bench`, the work-alike of llama-bench: same options, runs, tables and output formats.

Called by `cli/bench.py`. Only `rig` and `loader` touch the engine, `llm` and the workers; all other
rooms are plain Python that can be imported and tested without them.
"""
