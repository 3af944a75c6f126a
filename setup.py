"""Where each package's code lies; everything else is in pyproject.toml.

`kernels/`, `recipe/` and `demo/` are folders at the top of the repository, but install as
`sparse_cache.kernels` and so on: names that general at the top level would collide with other
projects, first of all with Hugging Face's own `kernels`, which transformers looks for.
"""

from setuptools import find_namespace_packages, find_packages, setup

FOLDERS = ("kernels", "recipe", "demo")

packages = ["sparse_cache", *(f"sparse_cache.{name}" for name in find_packages("sparse_cache"))]
package_dir = {"sparse_cache": "sparse_cache"}
for folder in FOLDERS:
    package = f"sparse_cache.{folder}"
    packages += [package, *(f"{package}.{name}" for name in find_namespace_packages(folder))]
    package_dir[package] = folder

setup(packages=packages, package_dir=package_dir)
