"""The worker: lends this machine's devices to heads.

A supervisor accepts connections; a session process serves each head, with one executor for each
device. Nothing here knows llama; the engine is reached only through `native`.
"""
