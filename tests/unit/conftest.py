"""Settings of the property tests: no deadline per example, because machines are noisy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("multigpu", deadline=None)
settings.load_profile("multigpu")
