"""Run a Python program with the garbage collector off until someone turns it on: `quick_start.py PROGRAM [ARGUMENTS]`.

What ComfyUI makes while it imports stays; looking through all of it again and again is a tenth of its start. The debug
pack, the first that ComfyUI loads, turns the collector on.
"""

import gc
import os
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
