"""What `dev.py` is made of. Standard library only, except `devtools/toy`, which runs in the environment it makes."""
