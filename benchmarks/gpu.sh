#!/usr/bin/env bash
# One command for a machine with one NVIDIA GPU and no network: builds csrc/, checks results on the device, measures. See gpu.py.
#   bash benchmarks/gpu.sh [--output FOLDER] [--parts build parity ...] [--small]
set -u
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
