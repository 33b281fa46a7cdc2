#!/bin/sh
# Builds Horovod 0.28.1, with Gloo and for torch alone, into the Python given by its whole path:
#     sh benchmarks/collectives/horovod.sh $PWD/build/bench-venv/bin/python
# It asks for C++14, and torch's headers need C++17. A C++ compiler and some minutes are needed.
set -eu
python=$1
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m pip install -q cmake==3.31.6 cloudpickle psutil pyyaml packaging setuptools wheel
"$python" -m pip download -q --no-deps --no-binary :all: --no-build-isolation -d "$place" horovod==0.28.1
tar xzf "$place/horovod-0.28.1.tar.gz" -C "$place"
cd "$place/horovod-0.28.1"
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' CMakeLists.txt horovod/torch/CMakeLists.txt
PATH=$(dirname "$python"):$PATH HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO MAKEFLAGS=-j2 \
  "$python" -m pip install --no-build-isolation --no-deps .
