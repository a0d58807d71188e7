# For type checkers: the promised name of a module that system/moved_names.py finds at run time.
from mlx_parallm.faces.primitives import *
