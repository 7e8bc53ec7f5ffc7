"""Who stays and who leaves when memory is freed. Pure: the host's objects come in through small ports."""
