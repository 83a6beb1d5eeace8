"""The process of `supervise serve`: settings, signals, the service manager. `service` runs it."""
