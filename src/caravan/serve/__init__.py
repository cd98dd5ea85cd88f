"""The HTTP server: OpenAI's API over a `Batcher`, and a page with the cluster beside a chat.

Called by the command line. Everything that computes is below; nothing here knows how a worker
works.
"""
