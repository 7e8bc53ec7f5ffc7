"""For all tests."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
