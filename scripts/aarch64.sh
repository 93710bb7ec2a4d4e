#!/usr/bin/env bash
# Installs and runs the package on an emulated 64-bit Arm machine: qemu-user under proot, over a root folder unpacked from
# Debian's arm64 packages. Nothing needs to be root, nothing is registered with the kernel. Takes about ten minutes.
#
#   scripts/aarch64.sh [FOLDER]     FOLDER (default: a temporary one) keeps the root and pip's cache for the next time
#
# Shows: wheels for aarch64 exist and fit together, also for JetPack's Pythons; the package installs from them without a
# compiler; inspect, plan, run and selftest work on the CPU; jetson/install.sh runs to its end and fails closed.
# Does not show: anything about a GPU, about speed, or about JetPack's own libraries. The kernel is the host's.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=${1:-$(mktemp -d)}
root=$work/root
# As Orin's Cortex-A78AE, and unlike qemu's default, it has dot products but neither SVE nor 8-bit matrix instructions.
export QEMU_CPU=${QEMU_CPU:-cortex-a76}

die() {
    echo "aarch64.sh: error: $*" >&2
    exit 1
}
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || die "no qemu for aarch64: apt-get install qemu-user-static"
for tool in proot apt-get dpkg-deb git; do
    command -v $tool >/dev/null || die "no $tool: apt-get install $tool (this script needs a Debian, for its package lists)"
done

step() { # what: runs it and says how long it took
    local began=$SECONDS code=0
    echo "\$ $1"
    "${@:2}" || code=$?
    echo "# $((SECONDS - began)) s"
    return $code
}

# The host's /sys is not shown: ONNX Runtime would read an x86 machine's processors there and crash.
arm() {
    nice -n 19 env -i PATH=/venv/bin:/usr/bin:/bin HOME=/home LANG=C.UTF-8 COLUMNS=120 QEMU_CPU="$QEMU_CPU" \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_NO_COMPILE=1 \
        ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
        proot -q "$qemu" -r "$root" -b /dev -b /proc -b /etc/resolv.conf -b /etc/hosts -b /etc/ssl/certs \
        "${binds[@]}" -w /home "$@"
}
binds=()
versions='import platform as p, onnxruntime, numpy, tokenizers, cuda.bindings as c
print(p.machine(), "Python", p.python_version(), *p.libc_ver(), "onnxruntime", onnxruntime.__version__, "numpy", numpy.__version__,
      "tokenizers", tokenizers.__version__, "cuda-bindings", c.__version__)'

make_root() { # from the host's own package sources, with apt's state in the work folder
    local apt=$work/apt deb
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    : >"$apt/status"
    cat >"$apt/apt.conf" <<TEXT
APT::Architecture "arm64";
APT::Architectures {"arm64";};
APT::Install-Recommends "false";
APT::Sandbox::User "";
Debug::NoLocking "true";
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
TEXT
    APT_CONFIG=$apt/apt.conf apt-get -qq update
    APT_CONFIG=$apt/apt.conf apt-get -qq -y install --download-only python3-venv libstdc++6 bash coreutils grep sed tar findutils mawk
    mkdir -p "$root.new"/usr/{bin,sbin,lib} "$root.new"/{dev,proc,root,tmp}
    for name in bin sbin lib; do ln -sfn "usr/$name" "$root.new/$name"; done
    # unpacked, not installed: nothing of Python needs its packages' scripts
    for deb in "$apt"/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$root.new"
    done
    ln -sfn mawk "$root.new/usr/bin/awk"
    mv "$root.new" "$root"
}

wheels() { # JetPack's Python and glibc, cuda-python for its driver
    local platforms=(--platform manylinux2014_aarch64) minor
    for minor in 17 26 27 28 31 34 "$2"; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
    arm pip install --dry-run --quiet --report /home/report.json --ignore-installed --only-binary :all: --target /home/none \
        --python-version "$1" --implementation cp "${platforms[@]}" \
        "/$(cd "$root" && echo home/wheel/mimo_edge-*.whl)" "$3"
    arm python -c 'import json
found = {p["metadata"]["name"].lower(): p["metadata"]["version"] for p in json.load(open("/home/report.json"))["install"]}
print(*(f"{name} {found[name]}" for name in ("cuda-python", "numpy", "onnxruntime", "tokenizers")), f"and {len(found) - 4} more")'
}

copy_source() {
    rm -rf "$root/home/src"
    mkdir -p "$root/home/src"
    git -C "$repo" ls-files -z --cached --others --exclude-standard | tar -C "$repo" --null --ignore-failed-read -T - -c | tar -C "$root/home/src" -x
}

pretend_jetson() { # what install.sh looks at, of a machine without a GPU
    local fake=$work/fake driver=$root/usr/lib/aarch64-linux-gnu/nvidia
    mkdir -p "$fake/device-tree" "$driver"
    echo '# R36 (release), REVISION: 4.3, GCID: 0, BOARD: generic, EABI: aarch64' >"$root/etc/nv_tegra_release"
    printf 'nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0' >"$fake/device-tree/compatible"
    printf 'NVIDIA Jetson Orin Nano Developer Kit\0' >"$fake/device-tree/model"
    touch "$driver/libcuda.so.1" "$fake/nvmap"
    echo 'root:x:0:0:root:/home:/bin/bash' >"$root/etc/passwd"
    binds=(-b "$fake/device-tree:/proc/device-tree" -b "$fake/nvmap:/dev/nvmap")
}

main() {
    [ -d "$root" ] || step "an arm64 root folder from Debian's packages" make_root
    copy_source
    echo "# $("$qemu" --version | head -n 1), QEMU_CPU=$QEMU_CPU"
    step "python3 -m venv /venv" arm /usr/bin/python3 -m venv --clear /venv
    step "pip install '.[cuda]'" arm pip install --quiet '/home/src[cuda]'
    step "versions" arm python -c "$versions"
    step "mimo-edge inspect" arm mimo-edge inspect
    step "mimo-edge plan --module orin-nano-8gb" arm mimo-edge plan --module orin-nano-8gb
    step "mimo-edge run -p 'pick up the red cup'" arm mimo-edge run -p "pick up the red cup"
    step "mimo-edge selftest" arm mimo-edge selftest
    if step "mimo-edge run --backend cuda" arm mimo-edge run --backend cuda -p x; then
        die "a GPU was found in an emulated machine"
    fi

    arm pip wheel --quiet --no-deps --wheel-dir /home/wheel /home/src
    step "JetPack 6.2: wheels for Python 3.10, glibc 2.35, CUDA 12.6" wheels 3.10 35 'cuda-python>=12.6.1,<12.7'
    step "JetPack 7.2: wheels for Python 3.12, glibc 2.39, CUDA 13.2" wheels 3.12 39 'cuda-python>=13.2,<13.3'

    pretend_jetson
    step "jetson/install.sh --dry-run" arm bash /home/src/jetson/install.sh --dry-run
    local failed=0
    rm -rf "$root/opt/mimo-edge"
    step "jetson/install.sh" arm bash /home/src/jetson/install.sh || failed=$?
    [ $failed = 1 ] || die "install.sh ended with $failed where nothing can run on a GPU, expected 1"
    step "versions" arm /opt/mimo-edge/bin/python -c "$versions"
    echo "# install.sh failed closed, as it should"
}

main
