"""The parent: spawns, feeds, watches, cancels and restarts workers. Never imports the worker or an engine.

Start reading at `supervisor.py`.
"""
