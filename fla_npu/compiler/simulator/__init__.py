"""A model of the cores of A2 and A3 chips, for programs that the vendor's compiler has finished (see `simulate.py`)."""
