"""`python -m multigpu` is the `multigpu` command."""

try:
    from .cli import main
except KeyboardInterrupt:  # so early that nothing of ours is there to say it
    raise SystemExit(130) from None

raise SystemExit(main())
