"""How long a test waits for another thread or process before it says that this one hangs."""

SECONDS = 600  # no result depends on it: on a busy machine a start alone may take a minute
