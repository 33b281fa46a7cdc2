"""The compiled part of Shoal, which is optional: without a compiler Python does it, slower.

It keeps to Python's stable interface: one wheel serves Python 3.11 and all later versions.
SHOAL_PURE=1 leaves it out, so that the wheel is for every platform. All else is in pyproject.toml.
"""

import os

from setuptools import Extension, setup

NATIVE = Extension(
    "shoal.shm_backend._native",
    ["shoal/shm_backend/native.c"],
    extra_compile_args=["-O3"],
    py_limited_api=True,
    optional=True,
)
if os.environ.get("SHOAL_PURE") == "1":
    setup()
else:
    setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp311"}})
