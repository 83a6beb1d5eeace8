"""The console: a page and its files, which ask the API as everybody else does."""
