"""Python faces of the native kernels in `csrc/`.

`library` finds and loads the shared library, `adam` calls its host Adam, `flash_attention` its attention; `products` says what products it finds.
"""
