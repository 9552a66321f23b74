#!/usr/bin/env bash
# Runs tests on an emulated Arm processor; the CPU kernel is compiled for it by a cross compiler:
#
#     tools/test_on_arm.sh -m "not slow" tests/kernels/test_cpu.py -k one_head
#
# Wants Debian's debootstrap (as root), g++-aarch64-linux-gnu and qemu-user, at least 8.2: an older
# one shows the host's /proc/cpuinfo, on which torch crashes. QEMU names another, QEMU_CPU the processor.
# The first call makes build/arm: Debian's Python 3.11 for Arm, and torch's aarch64 wheel with all
# that it requires (5 GB from an index that has builds for CUDA alone). Emulated, tests take some
# thirty times as long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
arm=$PWD/build/arm
mkdir -p "$arm"

if [ ! -x "$arm/root/usr/bin/python3.11" ]; then
    debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,libgomp1,libstdc++6 \
        bookworm "$arm/root"
    for package in "$arm"/root/var/cache/apt/archives/*.deb; do # its second stage would need Arm
        dpkg-deb --extract "$package" "$arm/root"
    done
    # What oneDNN asks the system for; files of the root stand before those of this machine.
    for cpu in "$arm"/root/sys/devices/system/cpu/cpu{0,1}/regs/identification; do
        mkdir -p "$cpu"
        echo 0x00000000413fd0c1 > "$cpu/midr_el1" # a Neoverse N1
    done
fi

if [ ! -d "$arm/site" ]; then
    platforms=(--platform manylinux2014_aarch64)
    for minor in $(seq 17 28); do
        platforms+=(--platform "manylinux_2_${minor}_aarch64")
    done
    grep -E '^(torch|hypothesis|numpy|pytest|safetensors)[=~]' requirements-dev.txt > "$arm/wanted.txt"
    ${PYTHON:-python3} -m pip install --quiet --target "$arm/site.part" --only-binary :all: \
        --python-version 3.11 "${platforms[@]}" --requirement "$arm/wanted.txt"
    # Processes that tests start are emulated too.
    printf 'import sys\n\nsys.executable = "%s"\n' "$arm/python" > "$arm/site.part/sitecustomize.py"
    mv "$arm/site.part" "$arm/site"
fi

cat > "$arm/python" <<END
#!/bin/sh
exec ${QEMU:-qemu-aarch64} -cpu ${QEMU_CPU:-neoverse-n1} -L $arm/root \\
    -E PYTHONPATH=$PWD:$arm/site:\$PYTHONPATH $arm/root/usr/bin/python3.11 "\$@"
END
chmod +x "$arm/python"

export CXX=${CXX:-aarch64-linux-gnu-g++} SPARSERING_CACHE=${SPARSERING_CACHE:-$arm/cache}
exec "$arm/python" -m pytest -p no:cacheprovider "$@"
