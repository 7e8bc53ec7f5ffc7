"""Components on other machines, over Ray (docs/remote.md). Imported only when a cluster is named, or by a worker."""
