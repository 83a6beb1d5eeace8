"""The command line `supervise`: a user of the public API like any other.

Start reading at `app.py`. Signals, terminals and exit codes belong here and to nothing below.
"""
