"""The HTTP routes under `/multigpu/`, and snapshots for clients that listen (docs/http.md)."""
