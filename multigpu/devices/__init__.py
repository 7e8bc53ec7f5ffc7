"""The devices of this machine. Nothing is probed when this is imported."""
