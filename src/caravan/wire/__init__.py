"""The wire, sans IO: command tables, record layouts, encoding, versions, Caravan's extension.

Nothing here touches a socket, a thread or ctypes; both ends and the tests are built on it.
"""
