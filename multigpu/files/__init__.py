"""What a model file holds, read from its header alone: names, shapes and bytes of the tensors, grouped into blocks.

Standard library only, except that `.gguf` needs the sizes of its quantised types from the optional `gguf` package.
"""

from .families import Model, describe_model
from .model_file import read_tensors
from .tensors import TensorInfo

__all__ = ["Model", "TensorInfo", "describe_model", "read_tensors"]
