"""The head's side of one device stream: dispatcher, tickets, events, sessions. No ggml in it."""
