"""Who may come in: the token that both ends know, and the client's side of a worker's door.

Used by heads, and by workers for the ways to other workers.
"""
