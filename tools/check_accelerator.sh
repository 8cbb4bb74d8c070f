#!/usr/bin/env bash
# Runs rs.attention, forward and backward, on this machine's GPU or NPU against dense attention in float64, and prints a
# table. Takes less than five minutes. Without such a device it says so; then the exit status is 0 too.
#
#   tools/check_accelerator.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
exec timeout 290 "${1:-.venv/bin/python}" tools/check_accelerator.py
