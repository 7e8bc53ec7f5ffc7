"""For all tests."""

from __future__ import annotations

import signal
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(Path(__file__).parents[1] / ".dev" / "hypothesis")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
