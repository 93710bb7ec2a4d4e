#!/usr/bin/env bash
# Installs mimo-edge on a Jetson Orin with JetPack 6.2 or 7.2, and says whether the machine is ready.
# No PyTorch, no Triton, no compiler. Run it again at any time: what is there already stays.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: jetson/install.sh [--dry-run] [--bundle DIR] [--prefix DIR] [--package SPEC] [--service] [--user NAME] [--root DIR]

  --dry-run       check everything, print what would be done, do nothing
  --bundle DIR    test this bundle at the end; without it the built-in model, which has no kernels for a GPU
  --prefix DIR    the virtual environment  [default: /opt/mimo-edge for root, else ~/.local/share/mimo-edge/venv]
  --package SPEC  what pip installs, such as a wheel  [default: the checkout that this script is in]
  --service       install the systemd unit too (as root); it is enabled only when all tests pass
  --user NAME     who will run the model  [default: whoever called sudo, else the current user]
  --root DIR      look for /etc, /proc, /dev and libraries below DIR (for tests)

Exit code: 0 ready; 1 something is wrong, each thing with its fix; 2 a wrong option; 3 no supported Jetson.
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dry_run='' bundle='' prefix='' package='' service='' user=${SUDO_USER:-$(id -un)} root=''

say() { echo "install.sh: $*"; }
error() { echo "install.sh: error: $*" >&2; }
die() {
    error "${*:2}"
    exit "$1"
}
wrong=0
problem() { # one line: what is wrong, and the fix
    error "$*"
    wrong=$((wrong + 1))
}
run() {
    if [ -n "$dry_run" ]; then
        echo "+ $*"
    else
        "$@"
    fi
}

parse_options() {
    while [ $# -gt 0 ]; do
        case $1 in
            --dry-run) dry_run=1 ;;
            --service) service=1 ;;
            --bundle | --prefix | --package | --user | --root)
                [ $# -ge 2 ] || die 2 "$1 needs a value: see jetson/install.sh --help"
                printf -v "${1#--}" '%s' "$2"
                shift
                ;;
            -h | --help)
                usage
                exit 0
                ;;
            *) die 2 "unknown option $1: see jetson/install.sh --help" ;;
        esac
        shift
    done
    [ -n "$package" ] || package=$(dirname "$here")
    if [ -z "$prefix" ]; then
        [ "$(id -u)" = 0 ] && prefix=/opt/mimo-edge || prefix=$HOME/.local/share/mimo-edge/venv
    fi
    [ -z "$bundle" ] || [ -f "$bundle/manifest.json" ] || die 2 "$bundle is not a bundle (no manifest.json): make one elsewhere with mimo-edge export SRC --target orin -o DIR"
    [ -z "$service" ] || [ -n "$dry_run" ] || [ "$(id -u)" = 0 ] || die 2 "--service writes to /etc/systemd: run this with sudo"
}

# ---- what machine this is ----

jetpack='' l4t='' driver='' pins=()
mark=mimo-edge.jetpack made='' # a file in the virtual environment: the JetPack that it was made for

detect() {
    [ -n "$root" ] || [ "$(uname -m)" = aarch64 ] || die 3 "this machine is $(uname -m), a Jetson is aarch64: elsewhere, pip install mimo-edge"
    local release="$root/etc/nv_tegra_release" compatible
    [ -e "$release" ] || die 3 "$release does not exist, so this is no Jetson (or a container): in a container use jetson/Dockerfile"
    compatible=$(tr '\0' ' ' 2>/dev/null <"$root/proc/device-tree/compatible") || compatible=''
    case $compatible in
        *tegra234*) ;;
        *) die 3 "this Jetson is '${compatible:-unknown}', supported is Orin (tegra234)" ;;
    esac
    # "# R36 (release), REVISION: 4.3, ..." is L4T 36.4.3
    l4t=$(sed -nE '1s/^# R([0-9]+) \(release\), REVISION: ([0-9.]+).*/\1.\2/p' "$release")
    case $l4t in
        36.[4-9]*) # 36.4.0 is JetPack 6.1, whose driver is CUDA 12.6 too
            # TensorRT 10.3's Python module does not work with NumPy 2
            jetpack=6.2 driver=12.6 pins=('cuda-python>=12.6.1,<12.7' 'numpy>=1.26,<2')
            [[ $l4t != 36.4.[0-2] ]] || die 3 "L4T $l4t is JetPack 6.1 or older: update to JetPack 6.2 (L4T 36.4.3 or newer) or 7.2"
            ;;
        39.[2-9]*) jetpack=7.2 driver=13.2 pins=('cuda-python>=13.2,<13.3') ;;
        *) die 3 "L4T '${l4t:-unreadable}' is not supported: JetPack 6.2 (L4T 36.4.3 to 36.x) or 7.2 (L4T 39.2 and newer 39.x)" ;;
    esac
    say "JetPack $jetpack (L4T $l4t, CUDA $driver), $(tr -d '\0' 2>/dev/null <"$root/proc/device-tree/model" || echo 'unknown board')"
}

# ---- what has to be in order before anything is installed ----

in_group() { # user, group: from the files, so that a membership that needs a new login counts
    local gid name
    name=$(grep -E "^$2:" "$root/etc/group" 2>/dev/null) || return 1
    gid=$(cut -d: -f3 <<<"$name")
    [[ ,$(cut -d: -f4 <<<"$name"), == *,"$1",* ]] || [ "$(grep -E "^$1:" "$root/etc/passwd" | cut -d: -f4)" = "$gid" ]
}

check_python() {
    local version
    version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=none
    case $version in
        3.10 | 3.11 | 3.12) ;;
        *) problem "python3 is $version, supported are 3.10 to 3.12: put /usr/bin first in PATH, JetPack $jetpack brings a supported one" ;;
    esac
    python3 -c 'import ensurepip, venv' 2>/dev/null || problem "python3 cannot make virtual environments: sudo apt-get install python3-venv"
}

check_gpu() {
    local libraries="$root/usr/lib/aarch64-linux-gnu" found=''
    for file in "$libraries"/{nvidia,tegra,.}/libcuda.so.1; do
        [ ! -e "$file" ] || found=$file
    done
    [ -n "$found" ] || problem "libcuda.so.1 is in none of $libraries/{nvidia,tegra}: sudo apt-get install --reinstall nvidia-l4t-cuda"
    [ -e "$root/dev/nvmap" ] || problem "/dev/nvmap does not exist, so the GPU's driver is not loaded: reboot, then see dmesg | grep -i nvgpu"
    for group in video render; do
        [ "$user" = root ] || in_group "$user" "$group" || problem "user $user is not in group $group and cannot open /dev/nvmap or /dev/dri/renderD*: sudo usermod -aG $group $user, then log out and in"
    done
    [ ! -e "$root/dev/nvmap" ] || [ "$user" = root ] || [ "$user" != "$(id -un)" ] || [ -w "$root/dev/nvmap" ] || problem "/dev/nvmap cannot be written by $user in this login: log out and in, or see 'Groups and udev' in jetson/README.md"
}

check_prefix() { # it may be made anew, so it has to be ours
    if [ -e "$prefix/$mark" ]; then
        made=$(cat "$prefix/$mark")
    elif [ -n "$(ls -A "$prefix" 2>/dev/null)" ]; then
        problem "$prefix is not empty and was not made by this script: choose another folder with --prefix, or remove it"
    fi
}

check_room() {
    local folder=$prefix free
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free" -ge 700 ] || problem "$folder has $free MB free and the installation takes about 350, 700 while it runs: free some, or choose another disk with --prefix"
}

# ---- what is done ----

# a bundle for Orin has to run on the GPU here, or not at all
choose_backend() { [ -n "$bundle" ] && [ -d "$bundle/kernels/sm_87" ] && echo cuda || echo auto; }

install_package() {
    # one whose Python is gone, or of another JetPack, is made anew
    if [ "$made" != "$jetpack" ] || ! "$prefix/bin/python" -c 'import pip' 2>/dev/null; then
        run python3 -m venv --clear "$prefix" || die 1 "no virtual environment in $prefix: choose a folder that $(id -un) may write with --prefix, or use sudo"
        [ -n "$dry_run" ] || echo "$jetpack" >"$prefix/$mark"
    fi
    run "$prefix/bin/pip" install --quiet --upgrade --only-binary :all: "${package}[cuda]" "${pins[@]}" ||
        die 1 "pip could not install $package: see its lines above; without a network, give --package a wheel and set PIP_FIND_LINKS to a folder of wheels"
}

link_tensorrt() { # its Python module belongs to the system's packages; nothing else of theirs is let in
    local module="$root/usr/lib/python3/dist-packages/tensorrt" site="$prefix/lib/python3/site-packages"
    [ -d "$module" ] || module=$(echo "$root"/usr/lib/python3.*/dist-packages/tensorrt)
    if [ ! -d "$module" ]; then
        say "advice: no TensorRT for Python, so the backend tensorrt is not available (cuda is): sudo apt-get install python3-libnvinfer"
        return
    fi
    [ -n "$dry_run" ] || site=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    run ln -sfn "$module" "$site/tensorrt"
}

test_machine() {
    run "$prefix/bin/mimo-edge" doctor ${bundle:+"$bundle"} || problem "doctor found something wrong: do what it says above, then run this again"
    run "$prefix/bin/mimo-edge" selftest ${bundle:+"$bundle"} --backend "$backend" || problem "selftest failed on backend $backend: do not use this installation; send the output of jetson/verify.sh"
}

install_service() {
    local unit=/etc/systemd/system/mimo-edge-robot.service settings=/etc/mimo-edge/robot.env
    id mimo-edge >/dev/null 2>&1 || run useradd --system --home-dir /var/lib/mimo-edge --shell /usr/sbin/nologin --groups video,render mimo-edge
    run install -D -m 644 "$here/examples/robot.py" "$prefix/share/mimo-edge/robot.py"
    run install -D -m 644 "$here/mimo-edge-robot.service" "$unit"
    run sed -i "s|/opt/mimo-edge|$prefix|g" "$unit"
    [ -e "$settings" ] || run install -D -m 644 "$here/robot.env" "$settings"
    [ -z "$bundle" ] || run sed -i "s|^#\\?BUNDLE=.*|BUNDLE=$(realpath "$bundle")|; s|^#\\?BACKEND=.*|BACKEND=$backend|" "$settings"
    run systemctl daemon-reload
}

parse_options "$@"
backend=$(choose_backend)
detect
check_python
check_gpu
check_prefix
check_room
[ $wrong = 0 ] || die 1 "$wrong thing(s) to put right; nothing was installed"
install_package
link_tensorrt
[ -z "$service" ] || install_service
test_machine
if [ $wrong != 0 ]; then
    [ -z "$service" ] || run systemctl disable --now mimo-edge-robot.service
    die 1 "installed in $prefix, but not ready${service:+; the service is off}"
fi
[ -z "$service" ] || run systemctl enable --now mimo-edge-robot.service
[ -n "$bundle" ] || say "the GPU was not tested: give a bundle exported with --target orin as --bundle DIR"
if [ -n "$dry_run" ]; then say "dry run: nothing was done"; else say "ready: $prefix/bin/mimo-edge run ${bundle:+$bundle }-p 'pick up the red cup'"; fi
