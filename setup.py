"""The compiled part of Shoal, which is optional: without a compiler Python does it, slower.

SHOAL_PURE=1 leaves it out, so that the wheel is for every platform. All else is in pyproject.toml.
"""

import os

from setuptools import Extension, setup

COMPILED = {
    "shoal.shm_backend._native": "shoal/shm_backend/native.c",
}
setup(
    ext_modules=[]
    if os.environ.get("SHOAL_PURE") == "1"
    else [
        Extension(name, [source], extra_compile_args=["-O3"], optional=True)
        for name, source in COMPILED.items()
    ]
)
