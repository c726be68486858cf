"""Python faces of the native kernels in `csrc/`.

`library` finds and loads the shared library, `adam` calls its host Adam.
"""
