"""`python -m multigpu` is the `multigpu` command."""

from .cli import main

raise SystemExit(main())
