"""Streaming: a block's bytes are copied from their home to the compute device just before use.

`schedule` and `ring_ledger` are pure; the rest needs torch. Nothing here knows the host.
"""
