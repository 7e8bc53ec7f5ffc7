"""Which models stay and which are unloaded when memory is freed. Pure: `Ports` are the only access to host objects."""
