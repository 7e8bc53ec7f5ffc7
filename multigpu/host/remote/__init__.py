"""Components on other machines: what a worker does for them, and what stands for them here."""
